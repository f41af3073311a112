"""Builds drafter, verifier or population from model paths, a config and the ranks; the package that imports all
others."""
