"""Prompts: held-out sources of the embedded pair, task files as they are published."""
