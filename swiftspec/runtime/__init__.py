"""A model at work: who runs a forward, and how."""
