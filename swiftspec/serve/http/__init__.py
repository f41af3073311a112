"""HTTP front end (API server) in its own process. Rank 0 decodes in another process and has no client connections."""
