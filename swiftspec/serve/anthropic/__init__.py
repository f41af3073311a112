"""Anthropic's endpoint: messages."""
