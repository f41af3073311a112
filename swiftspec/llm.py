"""`LLM`: what a Python caller holds. It assembles the roles and decodes on them."""

from __future__ import annotations

import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Unpack

from swiftspec.assemble.models import Models, Options
from swiftspec.assemble.roles import assemble
from swiftspec.config import EngineConfig
from swiftspec.distributed.facts import telling
from swiftspec.distributed.rank import Rank
from swiftspec.distributed.world import World
from swiftspec.engine import Chunk, Completion, Engine, Stats
from swiftspec.params import SamplingParams


class LLM:
    """A target model and perhaps a draft, decoding one request at a time.

    With a `world` this is its rank 0, and the other ranks run `serve_rank` with the same arguments. Raises UserError
    where a model cannot be loaded or the pair does not fit.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        world: World | None = None,
        **options: Unpack[Options],
    ) -> None:
        config = config if config is not None else EngineConfig(mode="serial" if draft is not None else "ar")
        with telling(world):
            models = Models.check(target, draft, config, world, options)
        self.roles = assemble(models, config, world, options.get("progress"))
        self.config = self.roles.config
        self.engine = Engine(self.roles.decoding, self.roles.limits)

    @property
    def stats(self) -> Stats:
        """What the request begun last has cost so far."""
        return self.engine.stats

    @property
    def max_model_len(self) -> int:
        return self.roles.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.roles.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.roles.limits.eos_token_ids

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes to the end. Raises UserError on a prompt that is empty or does not fit."""
        return self.engine.generate(prompt, sampling)

    def stream(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Generator[Chunk]:
        """Yields a chunk a round, as `Engine.stream` says; closing the iterator ends the request."""
        return self.engine.stream(prompt, sampling)

    def close(self) -> None:
        """Sends the other ranks home and closes the trace."""
        self.roles.close()


def serve_rank(
    world: World, target: str | Path, draft: str | Path | None, config: EngineConfig, **options: Unpack[Options]
) -> None:
    """The life of any rank but 0, until rank 0 leaves. Raises RankLost when that, or a group's leader, is just gone."""
    with telling(world):
        models = Models.check(target, draft, config, world, options)
    rank = Rank(world, config, models, options.get("progress"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears the user, and says when to leave
    try:
        rank.follow(traced=models.trace is not None)
    finally:
        signal.signal(signal.SIGINT, before)
