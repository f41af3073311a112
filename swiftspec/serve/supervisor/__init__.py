"""Supervisor: starts the ranks and the front end of a job, checks their heartbeats and restarts them."""
