"""Builds drafter, verifier or population from model paths, an engine configuration and the ranks. It imports the
packages of all these parts, and none of them imports it."""
