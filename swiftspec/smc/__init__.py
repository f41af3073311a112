"""Many weighted particles in place of verification."""
