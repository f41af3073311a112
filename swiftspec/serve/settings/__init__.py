"""Settings: their table, the sources they are read from, and what they are converted to."""
