"""Metrics, tracing and round events of the HTTP server."""
