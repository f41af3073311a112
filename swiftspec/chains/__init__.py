"""Verifies many chains of draft tokens in one call, on any device. No mode uses it yet; bench.verify measures it."""
