"""Prompts: sources held out from the training of the demo models, and published task files."""
