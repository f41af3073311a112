"""Observation of decoding: traces, acceptance statistics, RPC latency, emulated step times."""
