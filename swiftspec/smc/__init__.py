"""Sequence groups: sequential Monte Carlo decoding with weighted particles, and exact batches of one particle per
request."""
