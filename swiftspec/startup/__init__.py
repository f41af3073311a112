"""Startup: from settings to a loaded model pair with its tokenizer."""
