"""Per-request metrics and OpenTelemetry tracing of the HTTP server."""
