"""One request as a population of particles: the host's side. What the device does alone is smc/round.py.

The host starts rounds and counts slots, N (K + 1) a round, which needs no reading. What it wants to know (who has
finished, which slots are free, what all particles share) it reads from a copy, a round late where the device runs
ahead. Letters: N particles, K draft tokens a round. Source: SMC-SD engine v0.1 sections 3.1 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swiftspec.config import PopulationConfig
from swiftspec.errors import NotFinite, UserError
from swiftspec.messages import Opening
from swiftspec.params import SamplingParams
from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.steps import choose, features
from swiftspec.runtime.steps.rounds import Rounds
from swiftspec.smc.particles import LIVE, SHARED
from swiftspec.smc.round import SMCRound
from swiftspec.tree.mask import WIDTHS

REGION = 32768  # tree slots at most


def region(config: PopulationConfig, context: int) -> int:
    """Tree slots for a population: all that N texts of `context` tokens could need, if that is not too many. A
    multiple of the widest window. Raises UserError where two rounds would not fit."""
    widest = WIDTHS[-1]
    slots = min(config.particles * context + 2 * config.slots, REGION)
    most = (REGION - 1) // (2 * (config.smc_draft_tokens + 1))
    if config.particles > most:
        raise UserError(
            f"{config.particles} particles with {config.smc_draft_tokens} draft tokens do not fit the cache of {REGION}"
            f" slots: at most {most} particles do"
        )
    return -(-slots // widest) * widest


def check_sampling(sampling: SamplingParams) -> None:
    """Refuses what a population cannot follow."""
    if sampling.greedy:
        raise UserError("mode smc samples, and temperature 0 leaves nothing to sample: raise it, or take mode serial")
    if sampling.penalised:
        raise UserError("mode smc knows no penalties: set repetition, presence and frequency back, or take mode serial")
    if sampling.guided:
        raise UserError("mode smc knows no guidance: leave guidance_scale at 1, or take mode serial")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise UserError("mode smc gives no log-probabilities: leave them out, or take mode serial")
    if sampling.verify_batch is not None or sampling.draft_steps is not None:
        raise UserError("mode smc has no draft tree: leave verify_batch and draft_steps out, or take mode serial")
    if sampling.grammar is not None:
        raise UserError("mode smc knows no grammar: leave it out, or take mode serial")


@dataclass(frozen=True, slots=True)
class Report:
    """What the host reads of a round. `tokens`: the common prefix of all particles."""

    tokens: list[int]
    done: bool  # every particle has finished


@dataclass(frozen=True, slots=True)
class Answer:
    """The particle that was picked, and what became of the population."""

    tokens: list[int]
    stopped: bool  # by a stop token
    coalesced_prefix: int  # tokens that all particles shared in the end
    ess_mean: float  # particles' worth of weight, mean over the rounds
    resample_rate: float  # share of the rounds
    log_z: float  # estimate of the power target's log-normaliser
    full: bool  # the cache had no room for another round
    compactions: int
    moved_slots: int  # by compactions; fan-out and resampling move none


class SMC:
    """The worker of mode smc: both models, one population. `lag`: rounds that the host is behind the device.

    In a group of ranks each has its shares of both models; the logits are gathered, so that everything else happens on
    all of them alike.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        steps: Sequence[Rounds],
        config: PopulationConfig,
        *,
        longest: int,
        lag: int = 0,
    ) -> None:
        """`steps`: those that run rounds of both models, the fastest first."""
        self.target, self.draft, self.config = target, draft, config
        self.steps_known = steps
        self._lag = lag
        self.round = SMCRound(target, draft, config, longest)
        self.particles = self.round.particles

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def drafted(self) -> int:
        return self.config.particles * self.config.smc_draft_tokens

    def choose(self, opening: Opening) -> Rounds:
        """The steps that run a request."""
        return choose(self.steps_known, features(opening.sampling, "population"), opening.steps)

    def open(self, opening: Opening, stops: Collection[int], limit: int) -> int:
        """Prefills the parent once on both models and fans out. Texts end at a token of `stops` or after `limit`. The
        request is one that `check_sampling` lets pass. Returns how many tokens were kept from earlier ones."""
        prompt = opening.tokens
        self._steps = self.choose(opening)
        kept = [runner.open(prompt, most=opening.kept) for runner in (self.target, self.draft)]
        for runner in (self.target, self.draft):
            runner.cache.append_tree(1)
        self.round.open(prompt, opening.sampling, stops, limit)
        self.rounds = self.compactions = self.moved_slots = 0
        self.full = self._done = False
        self._told: deque[AsyncCopy] = deque()
        self._due = 2 * self.config.slots  # tree slots in use from which compaction is worth its while
        # without rejections every particle grows by K + 1 tokens a round, so that the last round is known beforehand
        self._last = -(-limit // self.particles.step) if not self.round.rejects else limit
        self.report = Report([], False)
        self.answer: Answer | None = None
        return kept[0]

    def close(self) -> None:
        """The prompt stays; of the answer that was picked nobody holds the keys and values any more."""
        for runner in (self.target, self.draft):
            runner.cache.commit(())

    def launch(self) -> bool:
        """Starts a round. False where none is needed, or none fits (`full`)."""
        if self._done or self.rounds == self._last:
            return False
        if self.target.cache.tree_len >= self._due or self._room() < self.config.slots:
            self._compact()
        self.full = self._room() < self.config.slots
        if self.full:
            return False
        for runner in (self.target, self.draft):
            runner.cache.append_tree(self.config.slots)
        told = self._steps.round(
            self.round, self._width(self.target.cache.tree_len), self.round.shaping, self.particles.state
        )
        self._told.append(AsyncCopy(told))
        self.rounds += 1
        return True

    def collect(self) -> Report:
        """What is known by now: the last round's outcome, or of the one `lag` rounds before. Raises NotFinite."""
        while len(self._told) > self._lag:
            self._read()
        return self.report

    def finish(self) -> Answer:
        """Picks one particle, once. Waits for the device. Raises NotFinite as `collect` does."""
        if self.answer is not None:
            return self.answer
        while self._told:
            self._read()
        p, rounds = self.particles, max(self.rounds, 1)
        row = int(p.pick(self.round.streams.pick()))
        self.answer = Answer(
            tokens=p.tokens[row, : int(p.length[row])].tolist(),
            stopped=bool(p.stopped[row]),
            coalesced_prefix=int(p.common()),
            ess_mean=float(p.ess) / rounds,
            resample_rate=int(p.resampled) / rounds,
            log_z=float(p.evidence()),
            full=self.full,
            compactions=self.compactions,
            moved_slots=self.moved_slots,
        )
        return self.answer

    def _width(self, slots: int) -> int:
        """Of the window that covers so many tree slots."""
        return min(self._steps.window(slots), self.particles.mask.shape[1])

    def _room(self) -> int:
        return self.particles.mask.shape[1] - self.target.cache.tree_len

    def _read(self) -> None:
        """Takes in the oldest copy."""
        head = self._told.popleft().read()
        common, finished = head[:2].tolist()
        if common < 0:
            for runner in (self.target, self.draft):
                runner.cache.reset(0)  # as LocalVerifier.verify does
            raise NotFinite("the target's or the draft's")
        self.report = Report(head[2 : 2 + common].tolist(), finished == self.config.particles)
        self._done = self.report.done

    def _compact(self) -> None:
        """Promotes the slots that all live rows share to the prefix and drops those that nobody holds. Waits for the
        device, now and then: at the earliest when as many slots as survived, or two rounds', have been handed out."""
        used = self.target.cache.tree_len
        state = self.particles.columns(self._width(used))[:used].cpu()
        path = (state == SHARED).nonzero().flatten().tolist()
        keep = (state == LIVE).nonzero().flatten().tolist()
        self._due = len(keep) + max(len(keep), 2 * self.config.slots)
        if len(path) + len(keep) == used and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.commit(path, keep)
        self.particles.compact(path, keep)
        self.round.prefix += len(path)
        self.compactions += 1
        self.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
