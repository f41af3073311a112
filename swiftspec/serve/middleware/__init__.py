"""ASGI middleware and HTTP protocol limits."""
