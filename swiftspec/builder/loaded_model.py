"""One of the two models in memory, and the runners on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftspec.backends import cuda
from swiftspec.model.transformer import Transformer
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.executors.graph import Capture
from swiftspec.runtime.executors.selection import ExecutorDeps
from swiftspec.runtime.prefix_cache import PrefixCachingRunner
from swiftspec.runtime.runner import Runner, StepHook
from swiftspec.sampling.sampler import TokenConstraint
from swiftspec.sampling.vocab import VocabShard


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or this rank's share of it, that any number of runners may share: each has a cache of its own, and one
    of them works at a time."""

    model: Transformer
    ops: Any
    vocab: int
    context: int  # tokens of a text, and what its last round may overshoot
    prefix_cache_tokens: int  # of earlier texts, in each runner
    make_constraint: Callable[[str], TokenConstraint]
    hook: StepHook | None  # makes a step last longer
    capture: Callable[[], Capture] | None  # makes what captures graphs: each runner has its own

    def runner(self, tree_slots: int, cancel_check: CancelCheck) -> tuple[Runner, ExecutorDeps]:
        """A runner on a new cache, and what faster steps on it are made of. `cancel_check`: what it calls while it
        reads."""
        group = self.model.group
        shard = None if group is None else VocabShard(group, self.model.head_rows, self.vocab)
        sizes: Any = {"context": self.context, "tree_slots": tree_slots, "shard": shard}
        if self.prefix_cache_tokens > 0:
            runner = PrefixCachingRunner(self.model, self.ops, self.vocab, budget=self.prefix_cache_tokens, **sizes)
        else:
            runner = Runner(self.model, self.ops, self.vocab, **sizes)
        runner.make_constraint, runner.cancel_check = self.make_constraint, cancel_check
        if self.ops is cuda:
            runner.prefill_chunk_rows = cuda.PREFILL_CHUNK_ROWS
        if self.hook is not None:
            runner.hooks.append(self.hook)
        return runner, ExecutorDeps(self.ops, self.model.fused, None if self.capture is None else self.capture())
