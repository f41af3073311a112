"""Settings: the table of flags, and their conversion to engine configurations."""
