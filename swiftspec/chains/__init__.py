"""Chains of draft tokens verified in batches, on any device."""
