"""Replicated execution within a tensor-parallel group: a leader and its followers."""
