"""HTTP endpoints and the schemas of their requests."""
