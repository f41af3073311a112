"""OpenTelemetry export of spans (extra `otel`)."""
