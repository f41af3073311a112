"""Where the tests find `bench.baselines.engines`."""

from bench.baselines.engines import load_transformers

__all__ = ["load_transformers"]
