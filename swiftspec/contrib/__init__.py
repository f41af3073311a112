"""Adapters to other systems: OpenTelemetry and KV cache events."""
