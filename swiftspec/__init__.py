"""SwiftSpec: low-latency speculative decoding of one request. Import what you need from its rooms."""

__version__ = "0.1.0"
