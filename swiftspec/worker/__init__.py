"""A model with its cache, and the drafter and verifier built on it."""
