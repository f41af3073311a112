"""Batches of requests with a draft tree each."""
