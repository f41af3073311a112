"""Rounds on record: what both lanes did and when, one JSON line per round. Built around the roles when a trace is asked
for, so that nothing in a round knows of it.

Times are seconds of `time.perf_counter`, which all processes of one machine share. A line has the keys `request`,
`round`, and, as far as the mode has them:

    target     open and verify [begin, end], forward: seconds of `verify` inside the model
    population [begin, end], in mode smc; there target and draft have their forwards [begin, end, rows] only
    wait       [begin, end] of asking the drafter for this round's proposal
    proposal   tokens and parents; `path`: the accepted nodes; `tokens`: what the target sampled, the bonus token last
    draft      spans by name (open, observe, propose, grow), forwards [begin, end, rows], and the tree as it stands when
               the round's growing ends: nodes, expanded; reused, wasted: of the nodes that had KV a round before
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.messages import Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.around import AroundModel, T
from swiftspec.runtime.drafter import SteppedDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Model, Runner
from swiftspec.runtime.verifier import Pending, Verifier

Record = dict[str, Any]
Forward = tuple[float, float, int]  # begin, end, rows
VERSION = 1


class WatchedModel(AroundModel):
    """A model whose steps are noted."""

    def __init__(self, model: Model, forwards: list[Forward]) -> None:
        super().__init__(model, self._noted)
        self._forwards = forwards

    def _noted(self, rows: int, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = step()
        self._forwards.append((began, time.perf_counter(), rows))
        return result


def watch(runner: Runner) -> list[Forward]:
    """The forwards of a runner from now on; whoever reads them clears them."""
    forwards: list[Forward] = []
    runner.use(WatchedModel(runner.model, forwards))
    return forwards


class TraceLog:
    """Gathers the lines of a request on rank 0 and writes them when it ends. Raises UserError where it cannot write.

    `drain` fetches what another process still has to say of a round that is over; whoever has such a process sets it.
    """

    def __init__(self, file: Path) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self._rounds: dict[int, Record] = {}
        self._request = 0
        try:
            self._file = file.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--trace {file} cannot be written: {error.strerror}") from None

    def head(self, facts: Record) -> None:
        """The first line: what runs here."""
        self._write({"swiftspec_trace": VERSION, **facts})

    def begin(self, request: int) -> None:
        """Another request."""
        self._request = request

    def add(self, round_: int, **parts: Any) -> None:
        """More about a round of this request."""
        self._rounds.setdefault(round_, {"request": self._request, "round": round_}).update(parts)

    def draft(self, record: Record) -> None:
        """What the draft's lane says of a round."""
        if record.pop("request") == self._request:
            self.add(record.pop("round"), draft=record)

    def lacks(self, round_: int) -> bool:
        """Whether the draft's lane has yet to speak of that round."""
        return "draft" not in self._rounds.get(round_, {})

    def end(self) -> None:
        """Writes the rounds that were verified."""
        for _, line in sorted(self._rounds.items()):
            if "tokens" in line:
                self._write(line)
        self._rounds = {}
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: Record) -> None:
        self._file.write(json.dumps(line) + "\n")


class TracedVerifier:
    """Rank 0's verifier, whose rounds are noted."""

    def __init__(self, verifier: Verifier, log: TraceLog) -> None:
        self._verifier, self._log = verifier, log

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._log.begin(request)
        began = time.perf_counter()
        self._verifier.open(request, tokens, sampling, prompt_len)
        self._opened: tuple[float, float] | None = (began, time.perf_counter())

    def submit(self, proposal: Proposal) -> TracedPending:
        return TracedPending(self, proposal, self._verifier.submit(proposal))

    def settle(self) -> None:
        self._verifier.settle()

    def close(self) -> None:
        self._verifier.close()
        self._log.end()

    def note(self, proposal: Proposal, result: VerifyResult, began: float, forward: float) -> None:
        """A verification that ends now."""
        target: Record = {"verify": (began, time.perf_counter()), "forward": forward}
        if self._opened is not None:
            target["open"], self._opened = self._opened, None
        tree = {"tokens": proposal.tokens, "parents": proposal.parents}
        self._log.add(proposal.round, target=target, proposal=tree, path=result.path, tokens=result.tokens)


class TracedPending:
    """A verification that is noted when it has been waited for."""

    def __init__(self, verifier: TracedVerifier, proposal: Proposal, pending: Pending) -> None:
        self._verifier, self._proposal, self._pending = verifier, proposal, pending

    def wait(self) -> VerifyResult:
        began, busy = time.perf_counter(), self._verifier.busy
        result = self._pending.wait()
        self._verifier.note(self._proposal, result, began, self._verifier.busy - busy)
        return result


class TracedDrafter:
    """Rank 0's drafter: notes how long a proposal is waited for."""

    def __init__(self, drafter: SteppedDrafter, log: TraceLog) -> None:
        self._drafter, self._log = drafter, log
        self._round = 0

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def steps(self) -> int:
        """d, the expansions of a round."""
        return self._drafter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._drafter.steps = steps

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self._log.begin(request)
        self._drafter.open(request, tokens, sampling, prompt_len)

    def propose(self) -> Proposal:
        began = time.perf_counter()
        proposal = self._drafter.propose()
        self._round = proposal.round
        self._log.add(proposal.round, wait=(began, time.perf_counter()))
        return proposal

    def grow(self) -> None:
        self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(result)

    def close(self) -> None:
        self._drafter.close()
        if self._log.lacks(self._round):
            self._log.drain(self._round)


class TracedPopulation:
    """Notes the rounds of mode smc: nothing overlaps in it, so a round lasts from the end of the one before."""

    def __init__(self, target: Runner, draft: Runner, log: TraceLog) -> None:
        self._log, self._lanes = log, {"target": watch(target), "draft": watch(draft)}

    def begin(self, request: int) -> None:
        """A request whose prompt has been read."""
        self._log.begin(request)
        self._round, self._end = 0, time.perf_counter()
        for forwards in self._lanes.values():
            forwards.clear()

    def note(self, tokens: Sequence[int]) -> None:
        """A round that ends now, and the tokens that all particles have come to share by it."""
        began, self._end = self._end, time.perf_counter()
        lanes = {side: {"forwards": list(forwards)} for side, forwards in self._lanes.items()}
        self._log.add(self._round, population=(began, self._end), tokens=tokens, **lanes)
        self._round += 1
        for forwards in self._lanes.values():
            forwards.clear()

    def end(self) -> None:
        """Ends the request."""
        self._log.end()


class LaneDrafter:
    """The draft's own lane: a drafter on a model in this process, whose every round goes to `tell` once it is grown."""

    def __init__(self, drafter: LocalDrafter, tell: Callable[[Record], None]) -> None:
        self._drafter, self._tell = drafter, tell
        self._forwards = watch(drafter.runner)
        self._spans: dict[str, tuple[float, float]] = {}
        self._request, self._round = 0, 0
        self._prefix, self._expanded = 0, 0  # KV before this round

    @property
    def busy(self) -> float:
        return self._drafter.busy

    @property
    def steps(self) -> int:
        """d, the expansions of a round."""
        return self._drafter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._drafter.steps = steps

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        began = time.perf_counter()
        self._drafter.open(request, tokens, sampling, prompt_len)
        self._forwards.clear()  # the prompt's
        self._spans = {"open": (began, time.perf_counter())}
        self._request, self._round = request, 0
        self._prefix, self._expanded = self._books()

    def propose(self) -> Proposal:
        began = time.perf_counter()
        proposal = self._drafter.propose()
        self._spans["propose"] = began, time.perf_counter()
        self._round = proposal.round
        return proposal

    def grow(self) -> None:
        began = time.perf_counter()
        self._drafter.grow()
        self._spans["grow"] = began, time.perf_counter()
        self._end()

    def offer(self) -> None:
        return None  # an answer that Python does not see would not be on record

    def observe(self, result: VerifyResult) -> None:
        began = time.perf_counter()
        self._drafter.observe(result)
        self._spans["observe"] = began, time.perf_counter()

    def close(self) -> None:
        self._drafter.close()

    def _end(self) -> None:
        """KV is kept or computed, nothing else: what is missing from the books was wasted."""
        prefix, expanded = self._books()
        computed = sum(rows for _, _, rows in self._forwards)
        wasted = max(self._prefix + self._expanded + computed - prefix - expanded, 0)
        record: Record = {"request": self._request, "round": self._round, **self._spans}
        record |= {"forwards": list(self._forwards), "nodes": self._drafter.tree.count, "expanded": expanded}
        self._tell(record | {"reused": self._expanded - wasted, "wasted": wasted})
        self._prefix, self._expanded = prefix, expanded
        self._spans = {}
        self._forwards.clear()

    def _books(self) -> tuple[int, int]:
        return self._drafter.runner.cache.prefix_len[0], self._drafter.tree.expanded
