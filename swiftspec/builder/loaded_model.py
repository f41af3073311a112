"""One of the two models in memory, and the runners on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftspec.backends import cuda
from swiftspec.model.transformer import Transformer
from swiftspec.runtime.cancellation import Pause
from swiftspec.runtime.executors.graph import Capture
from swiftspec.runtime.executors.selection import Tools
from swiftspec.runtime.prefix_cache import KeepingRunner
from swiftspec.runtime.runner import Hook, Runner
from swiftspec.sampling.sampler import Rules
from swiftspec.sampling.vocab import VocabShard


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, or this rank's share of it, that any number of runners may share: each has a cache of its own, and one
    of them works at a time."""

    model: Transformer
    ops: Any
    vocab: int
    context: int  # tokens of a text, and what its last round may overshoot
    kept_tokens: int  # of earlier texts, in each runner
    rules: Callable[[str], Rules]
    hook: Hook | None  # makes a step last longer
    capture: Callable[[], Capture] | None  # makes what captures graphs: each runner has its own

    def runner(self, tree_slots: int, pause: Pause) -> tuple[Runner, Tools]:
        """A runner on a new cache, and what faster steps on it are made of. `pause`: what it calls while it reads."""
        group = self.model.group
        shard = None if group is None else VocabShard(group, self.model.head_rows, self.vocab)
        sizes: Any = {"context": self.context, "tree_slots": tree_slots, "shard": shard}
        if self.kept_tokens > 0:
            runner = KeepingRunner(self.model, self.ops, self.vocab, budget=self.kept_tokens, **sizes)
        else:
            runner = Runner(self.model, self.ops, self.vocab, **sizes)
        runner.rules, runner.pause = self.rules, pause
        if self.ops is cuda:
            runner.prompt_rows = cuda.PROMPT_ROWS
        if self.hook is not None:
            runner.hooks.append(self.hook)
        return runner, Tools(self.ops, self.model.fused, None if self.capture is None else self.capture())
