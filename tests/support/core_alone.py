"""The core without the rest: a pair of random models decodes serially on plain torch. Run as a separate process.

    python -m tests.support.core_alone FILE...

The files are those of the core, as docs/walkthrough.md lists them; every other module of swiftspec is refused. Prints
as JSON the tokens with and without a draft, and how many of them were draft tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class CoreOnlyFinder(MetaPathFinder):
    """Refuses to import any module of swiftspec except these."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "swiftspec" and name not in self.allowed:
            raise ImportError(f"{name} is not in the core")


def module_of(file: str) -> str:
    """swiftspec/tree/__init__.py -> swiftspec.tree"""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main(files: Sequence[str]) -> None:
    sys.meta_path.insert(0, CoreOnlyFinder({"swiftspec", *map(module_of, files)}))
    with_draft, accepted = decode(draft=True)
    print(json.dumps({"with a draft": with_draft, "alone": decode(draft=False)[0], "accepted": accepted}))


def decode(draft: bool) -> tuple[list[int], int]:
    """The tokens after a prompt, and how many of them were draft tokens."""
    from swiftspec.engine import Stats, StopCriteria, TreeDecoding, decode_request, request_start
    from swiftspec.params import SamplingParams
    from swiftspec.runtime.drafter import NoDrafter
    from swiftspec.runtime.executors.eager import EagerExecutor
    from swiftspec.runtime.local_drafter import LocalDrafter
    from swiftspec.runtime.verifier import LocalVerifier
    from swiftspec.tree.children import TopChildren
    from swiftspec.tree.tree import DraftTree

    target = make_runner(seed=0, noise=0.0)
    drafter: Any = NoDrafter()
    if draft:
        small = make_runner(seed=0, noise=0.05)
        tree, children = DraftTree(400, 40), TopChildren(4, coupled=True)
        shape: Any = SimpleNamespace(
            max_nodes=4, leaves_per_expansion=4, children_per_leaf=4, initial_draft_steps=3, proposal="coupled"
        )
        shape.calibration_for = lambda greedy: 1.0
        drafter = LocalDrafter(small, [EagerExecutor(small)], tree, children, shape)
    verifier = LocalVerifier(target, [EagerExecutor(target)])
    start = request_start(1, [3, 1, 4, 1, 5], SamplingParams(temperature=0.9, seed=7))
    decoding, stats = TreeDecoding(drafter, verifier), Stats()
    chunks = decode_request(decoding, start, StopCriteria(max_tokens=40, stop_token_ids=()), stats)
    return [token for chunk in chunks for token in chunk.token_ids], stats.accepted


def make_runner(seed: int, noise: float) -> Any:
    """A model of random tensors under their Hugging Face names, plus `noise`."""
    import torch

    from swiftspec.backends.reference import reference
    from swiftspec.model.checkpoint import FLOATS, Checkpoint
    from swiftspec.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
    from swiftspec.model.transformer import Transformer
    from swiftspec.runtime.runner import Runner

    class Random:
        folder = Path("random")

        def __init__(self) -> None:
            self.dice = torch.Generator().manual_seed(seed)
            self.more = torch.Generator().manual_seed(seed + 1)

        def __contains__(self, name: str) -> bool:
            return True

        def shape_of(self, name: str) -> tuple[int, ...]:
            raise NotImplementedError("read of formats only")

        def take(self, name: str, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
            made = torch.randn(shape, generator=self.dice, dtype=torch.float64)
            made += noise * torch.randn(shape, generator=self.more, dtype=torch.float64)
            return made / shape[-1] ** 0.5 if len(shape) > 1 else made.abs() + 0.5

        def skip(self, prefix: str) -> None:
            raise NotImplementedError("no layer shares keys and values")

    mixer = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(10000.0))
    layers = (LayerSpec(mixer, MlpSpec(intermediate_size=32)),) * 2
    spec = ModelSpec(vocab_size=32, hidden_size=16, layers=layers, norm_eps=1e-6, tie_word_embeddings=False)
    weights = Checkpoint(spec, Random()).read()
    model = Transformer(spec, weights, reference, "cpu", torch.float64, 128)
    return Runner(model, reference, spec.vocab_size, context=72, tree_slots=40)


if __name__ == "__main__":
    main(sys.argv[1:])
