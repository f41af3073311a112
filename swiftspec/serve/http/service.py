"""Rank 0 of a server: it opens the models, and decodes what the front end sends, until told to leave. Of HTTP it knows
the wire to the front end alone, which its keeper hands over, and another one whenever the front end is new."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, Any, overload

from swiftspec.distributed.keeping import Keeping, Member
from swiftspec.errors import NotFinite, RankLost, UserError
from swiftspec.observe.rounds import Noted
from swiftspec.params import SamplingParams
from swiftspec.serve import answer
from swiftspec.serve.found import Found
from swiftspec.serve.http import frames
from swiftspec.serve.http.front import defaults_of
from swiftspec.serve.http.lines import as_frame
from swiftspec.serve.http.wire import FrontEndLost, Wire
from swiftspec.serve.keeping.kept import Kept
from swiftspec.serve.session import Session, open_session
from swiftspec.serve.settings import Settings
from swiftspec.serve.terminal import Phases

if TYPE_CHECKING:
    from swiftspec.distributed.world import World
    from swiftspec.engine import Chunk
    from swiftspec.messages import Likelihood

FLUSH = 2.0  # seconds for the last frames at the end


def run(settings: Settings, kept: Kept, join: Callable[[Keeping], World | None]) -> int:
    """Serves until a signal or the front end ends it. `join` meets the other ranks. Returns the exit code. Raises
    UserError as the other commands do, and RankLost."""
    defaults = defaults_of(settings)
    teller = Teller(kept)
    phases = Telling(teller)
    try:
        try:
            world = join(kept.keeping(teller.members))
            if world is None:
                teller.members([Member(0, "target", os.getpid(), "up", kept.life)])
            session = open_session(settings, phases, world, warm_up=True, renders=False, tell=teller.found)
        except UserError as error:
            teller.tell(frames.Lost(str(error)))
            raise
        finally:
            phases.close()
        comes_again = False
        try:
            teller.tell(ready(session, defaults))
            kept.ready()
            with Stopping() as stopping:
                Service(session, teller, stopping, kept).run()
        except Exception:  # the keeper starts this rank again, and so are the others then
            comes_again = True
            raise
        finally:
            session.close(comes_again=comes_again)
    finally:
        teller.wire.close(FLUSH)
    return 0


class Teller:
    """What rank 0 says of itself and of the ranks goes to the front end, and is said again to the next one. `wire`: to
    the present one."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._lock = kept, Lock()
        self._said: dict[type[frames.Frame], frames.Frame] = {}
        self.wire = self._next(None)

    def tell(self, frame: frames.Frame) -> None:
        """A frame that stays true until another of its kind comes. From any thread."""
        with self._lock:
            self._said[type(frame)] = frame
            with suppress(FrontEndLost):
                self.wire.send(frame)

    def found(self, found: Found) -> None:
        """Where the models lie: the front end reads the tokenizer while the weights load."""
        self.tell(frames.Found(str(found.target)))

    def members(self, members: Sequence[Member]) -> None:
        """What the ranks are like. From any thread."""
        self.tell(frames.Ranks([frames.RankState(**asdict(member)) for member in members]))

    def renew(self, beside: int) -> bool:
        """Waits for the wire to the next front end, which hears what was said; False where the file `beside` has
        something to read before that."""
        wire = self._next(beside)
        if wire is None:
            return False
        with self._lock:
            self.wire.close(0)
            self.wire = wire
            if frames.Ready in self._said:
                self._said.pop(frames.Loading, None)
            for frame in self._said.values():
                with suppress(FrontEndLost):
                    wire.send(frame)
        return True

    @overload
    def _next(self, beside: None) -> Wire: ...
    @overload
    def _next(self, beside: int) -> Wire | None: ...
    def _next(self, beside: int | None) -> Wire | None:
        end = self._kept.wire(beside)
        return None if end is None else Wire(end)


class Telling(Phases):
    """Phases of the start, which clients hear of, too."""

    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self._teller = teller

    def begin(self, phase: str, step: str = "") -> None:
        super().begin(phase, step)
        self._teller.tell(frames.Loading(f"{phase} {step}".rstrip()))


class Stopping:
    """The first signal asks for a graceful end, which `asked` and the file `heard` say; a second one ends the command
    as it ends any other. Without this the first would raise in the midst of a round."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        self.heard, self._told = os.pipe()
        for number in self.NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        os.close(self.heard)
        os.close(self._told)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._restore()
            os.kill(os.getpid(), number)
        else:
            self.asked = True
            os.write(self._told, b".")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()


class Service:
    """Decodes requests one after the other."""

    def __init__(self, session: Session, teller: Teller, stopping: Stopping, kept: Kept) -> None:
        self._session, self._teller, self._stopping = session, teller, stopping
        self._pulse, self._url = kept.pulse, kept.first.decode()
        self._drained = self._left = self._cancelled = self._lost = False
        self._request = 0  # that runs, or ran last

    def run(self) -> None:
        """Until the front end says Leave. Raises what ends rank 0: RankLost."""
        while not self._left:
            self._pulse.rest()
            try:
                frame = self._teller.wire.wait(self._stopping.heard)
                if self._stopping.asked:
                    self._drain()
                self._take(frame)
            except FrontEndLost:
                self._watch(False)  # the next one says whether anybody listens there
                self._left = self._drained or not self._teller.renew(self._stopping.heard)

    def _take(self, frame: frames.ToEngine | None) -> None:
        if isinstance(frame, frames.Start):
            self._serve(frame)
        elif isinstance(frame, frames.Serving):
            print(f"swiftspec: listening on {self._url} (a browser shows the tree there)", file=sys.stderr, flush=True)
        elif isinstance(frame, frames.Watch):
            self._watch(frame.on)
        elif isinstance(frame, frames.Leave):
            self._left = True

    def _watch(self, on: bool) -> None:
        self._session.llm.listen(self._say if on else None)

    def _say(self, noted: Sequence[Noted]) -> None:
        """For whoever listens; nobody is lost where that is nobody any more."""
        with suppress(FrontEndLost):
            self._teller.wire.send(partial(as_frame, noted))

    def _drain(self) -> None:
        if not self._drained:
            self._drained = True
            os.read(self._stopping.heard, 1)
            with suppress(FrontEndLost):
                self._teller.wire.send(frames.Drain())

    def _serve(self, start: frames.Start) -> None:
        """One request, to its `Done` or `Failed`. Raises FrontEndLost where nobody hears them."""
        self._request, self._cancelled, self._lost = start.request, False, False
        tokens, wire = 0, self._teller.wire
        try:
            sampling = SamplingParams(**start.sampling)
            with closing(self._session.llm.stream(start.prompt, sampling, self._over)) as chunks:
                for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    self._tell(chunk)
                    if self._over():
                        break
        except RankLost as error:
            with suppress(FrontEndLost):
                wire.send(frames.Lost(str(error)))
            raise
        except FrontEndLost:
            raise
        except (UserError, TypeError) as error:
            wire.send(frames.Failed(start.request, str(error), user=not isinstance(error, NotFinite)))
        else:
            if not self._lost:
                wire.send(self._done(start.request, tokens, sampling))

    def _over(self) -> bool:
        """Whether the request is to end: the front end has cancelled it, leaves, or is gone. Asked in the midst of a
        prompt, where all ranks must go on alike: so it raises nothing."""
        self._pulse.work()
        if self._stopping.asked:
            self._drain()
        try:
            frame = self._teller.wire.poll()
        except FrontEndLost:
            self._lost, frame = True, None
        if isinstance(frame, frames.Leave):
            self._left = True
        elif isinstance(frame, frames.Watch):
            self._watch(frame.on)
        elif isinstance(frame, frames.Cancel) and frame.request == self._request:
            self._cancelled = True
        return self._left or self._cancelled or self._lost

    def _tell(self, chunk: Chunk) -> None:
        """A round's tokens for the front end."""
        wire = self._teller.wire
        if chunk.prompt is not None:
            wire.send(frames.Prompt(self._request, as_frames(chunk.prompt)))
        likelihoods = None if chunk.likelihoods is None else as_frames(chunk.likelihoods)
        tokens = list(chunk.token_ids)
        wire.send(frames.Chunk(self._request, tokens, chunk.accepted, likelihoods, chunk.finish_reason))

    def _done(self, request: int, tokens: int, sampling: SamplingParams) -> frames.Done:
        llm = self._session.llm
        more = answer.guidance(sampling) if sampling.guided else {}
        if llm.config.mode == "smc":
            more = {**more, **answer.population(llm.config, llm.stats)}
        timings = answer.timings(llm.stats, tokens, llm.load_time)
        metrics = answer.metrics(llm.config.for_request(sampling), llm.stats, tokens, llm.outages)
        return frames.Done(request, timings, metrics, more)


def as_frames(likelihoods: Sequence[Likelihood]) -> list[frames.Likelihood]:
    """As they travel."""
    return [frames.Likelihood(one.logprob, list(one.top)) for one in likelihoods]


def ready(session: Session, defaults: Mapping[str, Any]) -> frames.Ready:
    """What the front end is to know of the models. `defaults`: sampling values that go before the model's own."""
    llm = session.llm
    return frames.Ready(
        model=session.model, draft_model=session.draft_model, max_model_len=llm.max_model_len,
        vocab_size=llm.vocab_size, eos_token_ids=list(llm.eos_token_ids), defaults={**session.defaults, **defaults},
        plan=asdict(llm.config), load_ms=round(llm.load_time * 1e3, 3),
        head=llm.roles.head,
    )  # fmt: skip
