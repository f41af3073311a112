"""Ranks: who is in which group, and what they say to each other."""
