"""Prompts: files held out from the training of the demo models, small functions, and published task files."""
