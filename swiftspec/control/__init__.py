"""Adaptation of d, of bs and of the use of the draft to measurements of recent rounds."""
