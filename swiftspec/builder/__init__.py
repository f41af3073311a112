"""Makes drafter, verifier or population of two paths, a config and the ranks. No other room knows all the rooms."""
