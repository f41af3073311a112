"""Training and evaluation of the demo models, and the small quantised checkpoints for the tests."""
