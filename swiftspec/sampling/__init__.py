"""Sampling: logits processing, position-keyed noise, filters, grammars."""
