"""Launching a job: environment, store, rendezvous, startup barrier, supervision."""
