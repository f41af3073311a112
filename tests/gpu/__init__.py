"""Tests that need an NVIDIA GPU. Tests of several ranks on one GPU have "virtual" in their names, for
tools/gpu/steps.py."""
