"""An empty package of this name, which hides the model in the real one from the tests."""
