"""Re-exports `bench.baselines.engines` for the tests."""

from bench.baselines.engines import load_transformers

__all__ = ["load_transformers"]
