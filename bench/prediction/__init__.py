"""Predicted step times and speeds of model pairs on machines and networks that are not present."""
