"""One request as a population of particles: the host's side. What the device does alone is smc/round.py.

The host starts rounds and counts slots, N (K + 1) a round, which needs no reading. What it wants to know (who has
finished, which slots are free, what all particles share) it reads from a copy, a round late where the device runs
ahead. Letters: N particles, K draft tokens a round. Source: SMC-SD engine v0.1 sections 3.1 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftspec.errors import UserError
from swiftspec.params import PopulationConfig, SamplingParams
from swiftspec.runtime.async_copy import AsyncCopy
from swiftspec.runtime.graph import Rounds
from swiftspec.runtime.runner import Runner
from swiftspec.smc.particles import LIVE, SHARED
from swiftspec.smc.round import SMCRound
from swiftspec.tree.mask import WIDTHS

REGION = 32768  # tree slots at most
NARROW = 16  # windows are multiples of this many slots, where any number of them will do


def region(plan: PopulationConfig, context: int) -> int:
    """Tree slots for a population: all that N texts of `context` tokens could need, if that is not too many. A
    multiple of the widest window. Raises UserError where two rounds would not fit."""
    widest = WIDTHS[-1]
    slots = min(plan.particles * context + 2 * plan.slots, REGION)
    most = (REGION - 1) // (2 * (plan.smc_draft_tokens + 1))
    if plan.particles > most:
        raise UserError(
            f"{plan.particles} particles with {plan.smc_draft_tokens} draft tokens do not fit the cache of {REGION}"
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


class Population(Protocol):
    """What decodes a request in mode smc: `launch` and `collect` in turn, `finish` once."""

    @property
    def plan(self) -> PopulationConfig: ...
    @property
    def rounds(self) -> int: ...
    @property
    def answer(self) -> Answer | None: ...
    @property
    def busy(self) -> tuple[float, float]:
        """Seconds that target and draft have spent in forwards."""
        ...

    @property
    def runners(self) -> tuple[Runner, Runner]:
        """Of target and draft."""
        ...

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int) -> None: ...
    def launch(self) -> bool: ...
    def collect(self) -> Report: ...
    def finish(self) -> Answer: ...
    def close(self) -> None: ...


class SMC:
    """The worker of mode smc: both models, one population. `lag`: rounds that the host is behind the device.

    Where both models' forwards can be captured, and are not a group's, a round is one graph for each width of the
    window; the seconds that it spends in either model cannot be told apart then, and `busy` leaves them out. In a group
    of ranks each has its shares of both models; the logits are gathered, so that everything else happens on all of them
    alike.
    """

    def __init__(
        self, target: Runner, draft: Runner, plan: PopulationConfig, vocab: int, *, longest: int, lag: int = 0
    ) -> None:
        self.target, self.draft, self.plan = target, draft, plan
        self._lag = lag
        self.round = SMCRound(target, draft, plan, vocab, longest)
        self.particles = self.round.particles
        self._graphs: Rounds | None = None
        alone = target.model.group is None  # a graph has no room for the gathering of whole logits, a library's
        if alone and target.capture is not None and draft.capture is not None:
            self._graphs = Rounds(self.round, self.particles.state, target.capture)

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self.target, self.draft

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stops: Collection[int], limit: int) -> None:
        """Prefills the parent once on both models and fans out. Texts end at a token of `stops` or after `limit`.
        `sampling` is one that `check_sampling` lets pass."""
        for runner in (self.target, self.draft):
            runner.reset()
            runner.prefill(prompt[:-1])
            runner.cache.append_tree(1)
        if self.round.open(prompt, sampling, stops, limit) and self._graphs is not None:
            self._graphs.forget()
        self.rounds = self.compactions = self.moved_slots = 0
        self.full = self._done = False
        self._mail: deque[AsyncCopy] = deque()
        self._due = 2 * self.plan.slots  # tree slots in use from which compaction is worth its while
        # without rejections every particle grows by K + 1 tokens a round, so that the last round is known beforehand
        self._last = -(-limit // self.particles.step) if not self.round.rejects else limit
        self.report = Report([], False)
        self.answer: Answer | None = None

    def close(self) -> None:
        for runner in (self.target, self.draft):
            runner.reset()

    def launch(self) -> bool:
        """Starts a round. False where none is needed, or none fits (`full`)."""
        if self._done or self.rounds == self._last:
            return False
        if self.target.cache.tree_len >= self._due or self._room() < self.plan.slots:
            self._compact()
        self.full = self._room() < self.plan.slots
        if self.full:
            return False
        for runner in (self.target, self.draft):
            runner.cache.append_tree(self.plan.slots)
        self._mail.append(AsyncCopy((self._graphs or self.round)(self._width(self.target.cache.tree_len))))
        self.rounds += 1
        return True

    def collect(self) -> Report:
        """What is known by now: the last round's outcome, or of the one `lag` rounds before."""
        while len(self._mail) > self._lag:
            self._read()
        return self.report

    def finish(self) -> Answer:
        """Picks one particle, once. Waits for the device."""
        if self.answer is not None:
            return self.answer
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
        """The window that covers `slots` tree slots; where rounds are captured, one of few, each with its graph."""
        step = WIDTHS[-1]
        if self._graphs is None:
            step = NARROW
        elif slots < step:
            step = next(width for width in WIDTHS if width >= slots)
        return min(-(-slots // step) * step, self.particles.mask.shape[1])

    def _room(self) -> int:
        return self.particles.mask.shape[1] - self.target.cache.tree_len

    def _read(self) -> None:
        """Takes in the oldest mail."""
        head = self._mail.popleft().read()
        common, finished = head[:2].tolist()
        self.report = Report(head[2 : 2 + common].tolist(), finished == self.plan.particles)
        self._done = self.report.done

    def _compact(self) -> None:
        """Promotes the slots that all live rows share to the prefix and drops those that nobody holds. Waits for the
        device, now and then: at the earliest when as many slots as survived, or two rounds', have been handed out."""
        used = self.target.cache.tree_len
        state = self.particles.columns(self._width(used))[:used].cpu()
        path = (state == SHARED).nonzero().flatten().tolist()
        keep = (state == LIVE).nonzero().flatten().tolist()
        self._due = len(keep) + max(len(keep), 2 * self.plan.slots)
        if len(path) + len(keep) == used and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.commit(path, keep)
        self.particles.compact(path, keep)
        self.round.prefix += len(path)
        self.compactions += 1
        self.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
