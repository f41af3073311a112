"""Rank 0 of a server: it opens the models, and decodes what the front end sends, until told to leave. Of HTTP it knows
the wire to the front end alone, which its keeper hands over, and another one whenever the front end is new."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from swiftspec.distributed.launch.supervision import Keeping, Member
from swiftspec.errors import RankLost, UserError
from swiftspec.observe.round_records import Noted
from swiftspec.observe.rpc_latency import Hop
from swiftspec.params import SamplingParams
from swiftspec.serve import answer_stats
from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.frame_socket import FrontEndLost
from swiftspec.serve.http.engine_link.frontend_process import defaults_of
from swiftspec.serve.http.engine_link.status_publisher import Teller, Telling
from swiftspec.serve.http.engine_link.trace_frames import as_frame
from swiftspec.serve.session import Session, open_session
from swiftspec.serve.settings.settings import Settings
from swiftspec.serve.supervisor.supervisor_client import Kept

if TYPE_CHECKING:
    from swiftspec.distributed.launch.world import World
    from swiftspec.engine import Chunk
    from swiftspec.messages import Likelihood
    from swiftspec.smc.decoding import Request

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
                Service(session, teller, stopping, kept, spans=settings.otlp_endpoint is not None).run()
        except Exception:  # the keeper starts this rank again, and so are the others then
            comes_again = True
            raise
        finally:
            session.close(comes_again=comes_again)
    finally:
        teller.wire.close(FLUSH)
    return 0


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
    """Decodes what the front end sends: as many requests at a time as the engine has room for."""

    def __init__(
        self, session: Session, teller: Teller, stopping: Stopping, kept: Kept, *, spans: bool = False
    ) -> None:
        """`spans`: the front end makes some of exchanges with workers."""
        self._session, self._teller, self._stopping = session, teller, stopping
        self._pulse, self._url = kept.pulse, kept.first.decode()
        self._drained = self._left = self._lost = False
        self._starts: deque[frames.Start] = deque()  # that no place was free for yet
        self._here = dict[int, tuple[int, int] | None]()  # that the engine has, with the choices asked for
        self._cancelled: set[int] = set()  # of either
        self._hops: list[Hop] = []  # that were not told yet
        if spans and session.llm.roles.hops is not None:
            session.llm.roles.hops.taken = self._hops.append

    def run(self) -> None:
        """Until the front end says Leave. Raises what ends rank 0: RankLost."""
        while not self._left:
            self._pulse.rest()
            try:
                frame = self._teller.wire.wait(self._stopping.heard)
                if self._stopping.asked:
                    self._drain()
                self._take(frame)
                while self._starts and not (self._left or self._lost):
                    self._serve()
            except FrontEndLost:
                self._lost = False
                for asked in (self._starts, self._here, self._cancelled):
                    asked.clear()
                self._watch(False)  # the next one says whether anybody listens there
                self._left = self._drained or not self._teller.renew(self._stopping.heard)

    def _take(self, frame: frames.ToEngine | None) -> None:
        if isinstance(frame, frames.Start):
            self._starts.append(frame)
        elif isinstance(frame, frames.Cancel):
            if frame.request in self._here or any(start.request == frame.request for start in self._starts):
                self._cancelled.add(frame.request)
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

    def _serve(self) -> None:
        """Requests as they come, each to its `Done` or `Failed`, until none is left. Raises FrontEndLost where nobody
        hears them."""
        wire = self._teller.wire
        try:
            with closing(self._session.llm.engine.together(self._next, self._over)) as chunks:
                for request, chunk in chunks:
                    if not self._lost:
                        self._tell(request, chunk)
        except RankLost as error:
            with suppress(FrontEndLost):
                wire.send(frames.Lost(str(error)))
            raise
        except FrontEndLost:
            raise
        except UserError as error:
            if not self._here:  # then it is no request's
                raise
            for number in sorted(self._here):
                self._end(frames.Failed(number, str(error), user=True))

    def _next(self) -> Request | None:
        """The next request that the engine is to begin with."""
        self._hear()
        while self._starts and not (self._left or self._lost):
            start = self._starts.popleft()
            try:
                sampling = SamplingParams(**start.sampling)
                request = self._session.llm.engine.request(start.request, start.prompt, sampling)
            except (UserError, TypeError) as error:
                self._end(frames.Failed(start.request, str(error), user=True))
            else:
                self._here[start.request] = start.choices
                self._hops.clear()
                return request
        return None

    def _over(self, request: Request) -> bool:
        """Whether a request is to end: the front end has cancelled it, leaves, or is gone. Asked in the midst of a
        prompt, where all ranks must go on alike: so it raises nothing."""
        self._pulse.work()
        if self._stopping.asked:
            self._drain()
        self._hear()
        return self._left or self._lost or request.number in self._cancelled

    def _hear(self) -> None:
        """What the front end has said meanwhile."""
        try:
            while (frame := self._teller.wire.poll()) is not None:
                self._take(frame)
        except FrontEndLost:
            self._lost = True

    def _tell(self, request: Request, chunk: Chunk) -> None:
        """A round's tokens for the front end; behind the last ones, how the request has ended."""
        wire, number = self._teller.wire, request.number
        if chunk.prompt is not None:
            wire.send(frames.Prompt(number, as_frames(chunk.prompt)))
        likelihoods = None if chunk.likelihoods is None else as_frames(chunk.likelihoods)
        if chunk.token_ids or chunk.finish_reason in (None, "stop", "length"):
            tokens, hops = list(chunk.token_ids), [*self._hops]
            self._hops.clear()
            wire.send(frames.Chunk(number, tokens, chunk.accepted, likelihoods, chunk.finish_reason, hops))
        if request.error is not None:
            self._end(frames.Failed(number, str(request.error), user=False))
        elif chunk.finish_reason is not None:
            self._end(self._done(request, self._here[number]))

    def _end(self, frame: frames.Done | frames.Failed) -> None:
        """A request has no place any more."""
        self._here.pop(frame.request, None)
        self._cancelled.discard(frame.request)
        self._teller.wire.send(frame)

    def _done(self, request: Request, choices: tuple[int, int] | None) -> frames.Done:
        llm, sampling, stats = self._session.llm, request.opening.sampling, request.stats
        more = answer_stats.guidance(sampling) if sampling.guided else {}
        if llm.config.mode == "smc":
            more = {**more, **answer_stats.population(llm.config, stats)}
        timings = answer_stats.timings(stats, stats.tokens, llm.load_time)
        metrics = answer_stats.metrics(llm.config.for_request(sampling), stats, stats.tokens, llm.outages)
        told: list[frames.Choice] = []
        if choices is not None and stats.population is not None:
            told = [frames.Choice([*each.tokens], "stop" if each.stopped else "length", each.weight)
                    for each in stats.population.choices(*choices)]  # fmt: skip
        return frames.Done(request.number, timings, metrics, more, told)


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
        head=llm.roles.head, at_once=llm.at_once,
    )  # fmt: skip
