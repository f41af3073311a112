"""Settings: the table of flags, the sources of values, and their conversion to engine configurations."""
