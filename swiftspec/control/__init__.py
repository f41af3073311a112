"""Adaptation of d and bs, and of speculation itself, to measured rounds."""
