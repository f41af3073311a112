"""A model in memory, and the runners on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftspec.backends.reference import Backend
from swiftspec.model.transformer import Transformer
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.graph import Capture
from swiftspec.runtime.prefix_caching import PrefixCachingRunner
from swiftspec.runtime.runner import Runner, StepHook
from swiftspec.sampling.sampler import TokenConstraint
from swiftspec.sampling.vocab import VocabShard


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, or this rank's shard of it, shared by any number of runners. Each runner has its own KV cache,
    and only one of them runs at a time."""

    model: Transformer
    ops: Backend
    vocab: int  # size of the base vocabulary
    context: int  # maximum tokens of a sequence, including the overshoot of its last round
    prefix_cache_tokens: int  # budget of each runner; 0 disables the prefix cache
    snapshot_tokens: int  # size of a snapshot in tokens; 0 unless a model has delta layers
    make_constraint: Callable[[str], TokenConstraint]  # compiles a grammar
    eos_token_ids: tuple[int, ...]  # end-of-text tokens of the target
    hook: StepHook | None  # prolongs steps, for emulated step times
    capture: Callable[[], Capture] | None  # creates a graph capture; each runner has its own

    def runner(self, tree_slots: int, cancel_check: CancelCheck) -> tuple[Runner, ExecutorDeps]:
        """Returns a runner with a new KV cache, and the dependencies from which its executors are built. `tree_slots`:
        slots of the cache's tree region. `cancel_check`: called before each prefill chunk."""
        group = self.model.group
        shard = None if group is None else VocabShard(group, self.model.head_rows, self.vocab)
        sizes: Any = {"context": self.context, "tree_slots": tree_slots, "shard": shard}
        if self.prefix_cache_tokens > 0:
            sizes |= {"budget": self.prefix_cache_tokens, "snapshot_tokens": self.snapshot_tokens}
            runner = PrefixCachingRunner(self.model, self.ops, self.vocab, **sizes)
        else:
            runner = Runner(self.model, self.ops, self.vocab, **sizes)
        runner.make_constraint, runner.cancel_check = self.make_constraint, cancel_check
        runner.eos_token_ids = self.eos_token_ids
        if self.hook is not None:
            runner.hooks.append(self.hook)
        return runner, ExecutorDeps(self.ops, self.model.fused, None if self.capture is None else self.capture())
