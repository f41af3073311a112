"""Keepers: light processes that start the ranks and the front end, watch them, and start them again."""
