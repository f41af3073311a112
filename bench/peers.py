"""Where the tests find `bench.rivals.engines`."""

from bench.rivals.engines import load_transformers

__all__ = ["load_transformers"]
