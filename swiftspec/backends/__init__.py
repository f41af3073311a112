"""Modules with the same fused functions, for one kind of hardware each."""
