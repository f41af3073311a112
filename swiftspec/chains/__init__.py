"""Verifies many chains of draft tokens in one call, on any device: those of exact requests side by side."""
