"""Ranks that share one model, by what connects them."""
