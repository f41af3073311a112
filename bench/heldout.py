"""Where the tests find `bench.data.heldout`."""

from bench.data.heldout import DEMO, read_prompts

__all__ = ["DEMO", "read_prompts"]
