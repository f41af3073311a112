"""Operator backends: modules that implement the same fused functions for one kind of hardware each."""
