"""Re-exports `bench.data.heldout` for the tests."""

from bench.data.heldout import DEMO, read_prompts

__all__ = ["DEMO", "read_prompts"]
