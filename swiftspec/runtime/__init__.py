"""Runs forwards for one request: the roles, the cache, and the kinds of steps."""
