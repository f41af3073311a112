"""Formats of requests and responses: conversations, reasoning, tool calls and log-probabilities."""
