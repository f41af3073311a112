"""How the embedded pair was made and measured, and the small quantised checkpoints of the tests."""
