"""Observation: traces, acceptance statistics, RPC latency and emulated step times."""
