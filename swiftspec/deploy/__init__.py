"""Replicas for schedulers of clusters: one replica is one engine, and more users need more replicas."""
