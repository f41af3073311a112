"""Rank 0 of a server: it starts the front end, opens the models, and decodes what the front end sends, until told to
leave. Of HTTP it knows the listening socket alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

from swiftspec.errors import NotFinite, RankLost, UserError
from swiftspec.params import SamplingParams
from swiftspec.serve import answer
from swiftspec.serve.found import Found
from swiftspec.serve.http import frames, tracing
from swiftspec.serve.http.address import names_of
from swiftspec.serve.http.wire import Wire
from swiftspec.serve.session import Session, open_session
from swiftspec.serve.settings import Settings, UsageError, flag_name
from swiftspec.serve.streams import warn
from swiftspec.serve.terminal import Phases

if TYPE_CHECKING:
    from swiftspec.distributed.world import World
    from swiftspec.engine import Chunk
    from swiftspec.messages import Likelihood

BACKLOG = 128  # connections that wait to be accepted, while the front end starts
FLUSH = 2.0  # seconds for the last frames at the end
DEFAULTS = (  # sampling flags that make sense for every request
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip
BYE = 5.0  # seconds in which a front end that has said Leave, or was told so, ends


def run(settings: Settings, world: World | None = None) -> int:
    """Serves until a signal or the front end ends it. Returns the exit code. Raises UserError as the other commands do:
    before anything is loaded where the address cannot be had."""
    defaults = defaults_of(settings)
    if settings.otlp_endpoint is not None:
        tracing.check(settings.otlp_endpoint)
    if not settings.api_key and names_of(settings.host) is None:
        warn(f"--host {settings.host} without --api-key: everybody who reaches this machine may ask")
    listening = listen(settings.host, settings.port or 0)
    with listening, FrontEnd(settings, listening) as front:
        phases = Telling(front.wire)
        try:
            session = open_session(settings, phases, world, warm_up=True, tell=front.tell)
        except UserError as error:
            front.wire.send(frames.Lost(str(error)))
            raise
        finally:
            phases.close()
        host, port = listening.getsockname()[:2]
        try:
            front.wire.send(ready(session, defaults))
            with Stopping() as stopping:
                Service(session, front.wire, stopping, f"http://{host}:{port}").run()
        finally:
            session.close()
    return 0


def defaults_of(settings: Settings) -> dict[str, Any]:
    """The sampling values that were given at the start, for requests that name none. Raises UsageError on what only a
    request can mean."""
    table, defaults = settings.table, dict[str, Any]()
    for name, flag in table.flags.items():
        if name in settings.model_fields_set and (flag.config is table.sampling or name == "negative_prompt"):
            if name not in DEFAULTS:
                raise UsageError(f"{flag_name(name)} is for one request, and clients bring their own: leave it out")
            defaults[name] = getattr(settings, name)
    return defaults


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError where the address is taken or not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be served ({error.strerror}): take another --port or --host, or end what is there"
        ) from None
    return listening


class FrontEnd:
    """The front end's process, which hears the first `Configure`, and our end of the wire."""

    def __init__(self, settings: Settings, listening: socket.socket) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", "swiftspec.serve.http", str(there.fileno()), str(listening.fileno())]
            self.process = subprocess.Popen(  # in a session of its own: signals are for us
                command, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=(there.fileno(), listening.fileno()),
            )  # fmt: skip
        self.wire = Wire(here)
        self.wire.send(configuration(settings))

    def tell(self, found: Found) -> None:
        """Where the models lie: it reads the tokenizer while the weights load."""
        self.wire.send(frames.Found(str(found.target)))

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *error: object) -> None:
        """Sends what is left, and sees to it that the process ends."""
        self.wire.close(FLUSH)
        try:
            self.process.wait(BYE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def configuration(settings: Settings) -> frames.Configure:
    """What the settings say of the front end."""
    return frames.Configure(
        model_name=settings.served_model_name or settings.model or "swiftspec-demo",
        api_keys=list(settings.api_key or []),
        max_queue=settings.max_queue,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.request_timeout,
        drain_timeout=settings.drain_timeout,
        host=settings.host,
        otlp_endpoint=settings.otlp_endpoint,
    )


class Telling(Phases):
    """Phases of the start, which clients hear of, too."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def begin(self, phase: str, step: str = "") -> None:
        super().begin(phase, step)
        self._wire.send(frames.Loading(f"{phase} {step}".rstrip()))


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

    def __init__(self, session: Session, wire: Wire, stopping: Stopping, url: str) -> None:
        self._session, self._wire, self._stopping, self._url = session, wire, stopping, url
        self._drained = self._left = self._cancelled = False
        self._request = 0  # that runs, or ran last

    def run(self) -> None:
        """Until the front end says Leave. Raises what ends a server: FrontEndLost, RankLost."""
        while not self._left:
            frame = self._wire.wait(self._stopping.heard)
            if self._stopping.asked:
                self._drain()
            self._take(frame)

    def _take(self, frame: frames.ToEngine | None) -> None:
        if isinstance(frame, frames.Start):
            self._serve(frame)
        elif isinstance(frame, frames.Serving):
            print(f"swiftspec: listening on {self._url}", file=sys.stderr, flush=True)
        elif isinstance(frame, frames.Leave):
            self._left = True

    def _drain(self) -> None:
        if not self._drained:
            self._drained = True
            os.read(self._stopping.heard, 1)
            self._wire.send(frames.Drain())

    def _serve(self, start: frames.Start) -> None:
        """One request, to its `Done` or `Failed`."""
        self._request, self._cancelled = start.request, False
        tokens = 0
        try:
            sampling = SamplingParams(**start.sampling)
            with closing(self._session.llm.stream(start.prompt, sampling, self._over)) as chunks:
                for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    self._tell(chunk)
                    if self._over():
                        break
        except RankLost as error:
            self._wire.send(frames.Failed(start.request, str(error), user=False))
            self._wire.send(frames.Lost(str(error)))
            raise
        except (UserError, TypeError) as error:
            self._wire.send(frames.Failed(start.request, str(error), user=not isinstance(error, NotFinite)))
        else:
            self._wire.send(self._done(start.request, tokens, sampling))

    def _over(self) -> bool:
        """Whether the request is to end: the front end has cancelled it, or leaves."""
        frame = self._wire.poll()
        if self._stopping.asked:
            self._drain()
        if isinstance(frame, frames.Leave):
            self._left = True
        elif isinstance(frame, frames.Cancel) and frame.request == self._request:
            self._cancelled = True
        return self._left or self._cancelled

    def _tell(self, chunk: Chunk) -> None:
        """A round's tokens for the front end."""
        if chunk.prompt is not None:
            self._wire.send(frames.Prompt(self._request, as_frames(chunk.prompt)))
        likelihoods = None if chunk.likelihoods is None else as_frames(chunk.likelihoods)
        tokens = list(chunk.token_ids)
        self._wire.send(frames.Chunk(self._request, tokens, chunk.accepted, likelihoods, chunk.finish_reason))

    def _done(self, request: int, tokens: int, sampling: SamplingParams) -> frames.Done:
        llm = self._session.llm
        more = answer.guidance(sampling) if sampling.guided else {}
        if llm.config.mode == "smc":
            more = {**more, **answer.population(llm.config, llm.stats)}
        timings = answer.timings(llm.stats, tokens, llm.load_time)
        return frames.Done(request, timings, answer.metrics(llm.config, llm.stats, tokens), more)


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
    )  # fmt: skip
