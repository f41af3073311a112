"""Engine server in rank 0: loads the models and decodes the requests of the front end until a shutdown is requested.

It receives requests only through the engine link to the front end. The supervisor passes a new socket whenever the
front end restarts.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from swiftspec.distributed.launch.supervision import RankInfo, SupervisorLink
from swiftspec.errors import RankLost, UserError
from swiftspec.observe.round_records import TraceEntry, to_record
from swiftspec.observe.rpc_latency import RpcRecord
from swiftspec.observe.trace_format import to_json, tokens_in
from swiftspec.params import SamplingParams
from swiftspec.serve import answer_stats
from swiftspec.serve.http.engine_link import frames
from swiftspec.serve.http.engine_link.frame_socket import FrontEndLost
from swiftspec.serve.http.engine_link.frontend_process import sampling_defaults
from swiftspec.serve.http.engine_link.status_publisher import LoadingPhases, StatusPublisher
from swiftspec.serve.session import Session, open_session
from swiftspec.serve.settings.settings import Settings
from swiftspec.serve.signals import GracefulStop
from swiftspec.serve.supervisor.supervisor_client import SupervisorClient

if TYPE_CHECKING:
    from swiftspec.distributed.launch.world import World
    from swiftspec.engine import TokenChunk
    from swiftspec.messages import Logprob
    from swiftspec.smc.decoding import BatchRequest

FLUSH_TIMEOUT_S = 2.0  # time at shutdown to send the last frames


def run_engine_server(
    settings: Settings, supervisor: SupervisorClient, join: Callable[[SupervisorLink], World | None]
) -> int:
    """Runs rank 0 until a signal or the front end requests the shutdown, then returns the exit code 0.

    `join`: joins the other ranks; returns None if rank 0 is the only one.
    Raises UserError if the models cannot be loaded, and RankLost if another rank is lost.
    """
    defaults = sampling_defaults(settings)
    publisher = StatusPublisher(supervisor)
    loading_phases = LoadingPhases(publisher)
    try:
        try:
            world = join(supervisor.supervision(publisher.publish_ranks))
            if world is None:
                publisher.publish_ranks([RankInfo(0, "target", os.getpid(), "up", supervisor.incarnation)])
            session = open_session(
                settings, loading_phases, world, warm_up=True, render_chats=False, on_resolved=publisher.publish_models
            )
        except UserError as error:
            publisher.publish(frames.EngineLostFrame(str(error)))
            raise
        finally:
            loading_phases.close()
        will_restart = False
        try:
            publisher.publish(engine_info(session, defaults))
            supervisor.set_ready()
            with GracefulStop() as stop:
                EngineServer(
                    session, publisher, stop, supervisor, send_rpc_records=settings.otlp_endpoint is not None
                ).run()
        except Exception:  # the supervisor restarts this rank and then the others
            will_restart = True
            raise
        finally:
            session.close(will_restart=will_restart)
    finally:
        publisher.socket.close(FLUSH_TIMEOUT_S)
    return 0


class EngineServer:
    """Server that decodes the front end's requests, as many concurrently as the engine supports."""

    def __init__(
        self,
        session: Session,
        publisher: StatusPublisher,
        stop: GracefulStop,
        supervisor: SupervisorClient,
        *,
        send_rpc_records: bool = False,
    ) -> None:
        """`send_rpc_records`: whether to send the records of RPCs to workers, which the front end exports as spans."""
        self._session, self._publisher, self._stop = session, publisher, stop
        self._heartbeat, self._url = supervisor.heartbeat, supervisor.first_message.decode()
        self._draining = self._shutting_down = self._frontend_lost = False
        self._queued: deque[frames.StartFrame] = deque()  # not started yet
        self._running = dict[int, tuple[int, int] | None]()  # requests in the engine, with their `choices`
        self._cancelled: set[int] = set()  # numbers of cancelled requests, queued or in the engine
        self._rpc_records: list[RpcRecord] = []  # not sent yet
        if send_rpc_records and session.llm.roles.rpc_log is not None:
            session.llm.roles.rpc_log.on_record = self._rpc_records.append

    def run(self) -> None:
        """Serves until the front end sends `ShutdownFrame` or is lost during a drain. Raises RankLost if a rank fails
        during decoding."""
        while not self._shutting_down:
            self._heartbeat.mark_idle()
            try:
                frame = self._publisher.socket.wait(self._stop.wakeup_fd)
                if self._stop.requested:
                    self._drain()
                self._dispatch(frame)
                while self._queued and not (self._shutting_down or self._frontend_lost):
                    self._decode_batch()
            except FrontEndLost:
                self._frontend_lost = False
                for requests in (self._queued, self._running, self._cancelled):
                    requests.clear()
                self._set_trace(False)  # the next front end subscribes again if it has subscribers
                self._shutting_down = self._draining or not self._publisher.reconnect(self._stop.wakeup_fd)

    def _dispatch(self, frame: frames.ToEngine | None) -> None:
        if isinstance(frame, frames.StartFrame):
            self._queued.append(frame)
        elif isinstance(frame, frames.CancelFrame):
            if frame.request in self._running or any(start.request == frame.request for start in self._queued):
                self._cancelled.add(frame.request)
        elif isinstance(frame, frames.ServingFrame):
            print(f"swiftspec: listening on {self._url} (a browser shows the tree there)", file=sys.stderr, flush=True)
        elif isinstance(frame, frames.SubscribeFrame):
            self._set_trace(frame.on)
        elif isinstance(frame, frames.ShutdownFrame):
            self._shutting_down = True

    def _set_trace(self, on: bool) -> None:
        self._session.llm.listen(self._send_trace if on else None)

    def _send_trace(self, records: Sequence[TraceEntry]) -> None:
        """Sends trace events, or drops them if the front end is lost."""
        with suppress(FrontEndLost):
            self._publisher.socket.send(partial(to_trace_frame, records))

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            os.read(self._stop.wakeup_fd, 1)
            with suppress(FrontEndLost):
                self._publisher.socket.send(frames.DrainFrame())

    def _decode_batch(self) -> None:
        """Decodes queued and arriving requests until the queue is empty. Each request ends with a `DoneFrame` or
        `FailedFrame`. Raises FrontEndLost or RankLost if the front end or a rank is lost."""
        socket = self._publisher.socket
        try:
            with closing(self._session.llm.engine.run_batch(self._next_request, self._should_end)) as chunks:
                for request, chunk in chunks:
                    if not self._frontend_lost:
                        self._send_chunk(request, chunk)
        except RankLost as error:
            with suppress(FrontEndLost):
                socket.send(frames.EngineLostFrame(str(error)))
            raise
        except FrontEndLost:
            raise
        except UserError as error:
            if not self._running:  # the error does not belong to a request
                raise
            for number in sorted(self._running):
                self._finish(frames.FailedFrame(number, str(error), user=True))

    def _next_request(self) -> BatchRequest | None:
        """Returns the next request for the engine to start, or None if the queue is empty. Rejects invalid requests."""
        self._receive_available()
        while self._queued and not (self._shutting_down or self._frontend_lost):
            start = self._queued.popleft()
            try:
                sampling = SamplingParams(**start.sampling)
                request = self._session.llm.engine.request(start.request, start.prompt, sampling)
            except (UserError, TypeError) as error:
                self._finish(frames.FailedFrame(start.request, str(error), user=True))
            else:
                self._running[start.request] = start.choices
                self._rpc_records.clear()
                return request
        return None

    def _should_end(self, request: BatchRequest) -> bool:
        """Returns whether to end a request because it was cancelled or the front end shuts down or is lost. Must not
        raise, since it is also called during a prefill, in which all ranks have to take the same steps."""
        self._heartbeat.mark_busy()
        if self._stop.requested:
            self._drain()
        self._receive_available()
        return self._shutting_down or self._frontend_lost or request.number in self._cancelled

    def _receive_available(self) -> None:
        """Processes the frames that have arrived."""
        try:
            while (frame := self._publisher.socket.poll()) is not None:
                self._dispatch(frame)
        except FrontEndLost:
            self._frontend_lost = True

    def _send_chunk(self, request: BatchRequest, chunk: TokenChunk) -> None:
        """Sends the tokens of a round, and after the last round also the `DoneFrame` or `FailedFrame`."""
        socket, number = self._publisher.socket, request.number
        if chunk.prompt_logprobs is not None:
            socket.send(frames.PromptLogprobsFrame(number, to_token_logprobs(chunk.prompt_logprobs)))
        logprobs = None if chunk.logprobs is None else to_token_logprobs(chunk.logprobs)
        if chunk.token_ids or chunk.finish_reason in (None, "stop", "length"):
            tokens, rpc_records = list(chunk.token_ids), [*self._rpc_records]
            self._rpc_records.clear()
            socket.send(frames.TokensFrame(number, tokens, chunk.accepted, logprobs, chunk.finish_reason, rpc_records))
        if request.error is not None:
            self._finish(frames.FailedFrame(number, str(request.error), user=False))
        elif chunk.finish_reason is not None:
            self._finish(self._done_frame(request, self._running[number]))

    def _finish(self, frame: frames.DoneFrame | frames.FailedFrame) -> None:
        """Removes a request and sends its last frame."""
        self._running.pop(frame.request, None)
        self._cancelled.discard(frame.request)
        self._publisher.socket.send(frame)

    def _done_frame(self, request: BatchRequest, choices: tuple[int, int] | None) -> frames.DoneFrame:
        llm, sampling, stats = self._session.llm, request.start.sampling, request.stats
        extra = answer_stats.guidance_stats(sampling) if sampling.guided else {}
        if llm.config.mode == "smc":
            extra = {**extra, **answer_stats.population_stats(llm.config, stats)}
        timings = answer_stats.timings(stats, stats.tokens, llm.load_time)
        metrics = answer_stats.metrics(llm.config.for_request(sampling), stats, stats.tokens, llm.outages)
        choice_frames: list[frames.Choice] = []
        if choices is not None and stats.population is not None:
            choice_frames = [frames.Choice([*each.tokens], "stop" if each.stopped else "length", each.weight)
                    for each in stats.population.choices(*choices)]  # fmt: skip
        return frames.DoneFrame(request.number, timings, metrics, extra, choice_frames)


def to_token_logprobs(logprobs: Sequence[Logprob]) -> list[frames.TokenLogprob]:
    """Converts the engine's `Logprob` objects to the `TokenLogprob` objects of a frame."""
    return [frames.TokenLogprob(one.logprob, list(one.top)) for one in logprobs]


def to_trace_frame(entries: Sequence[TraceEntry]) -> frames.TraceEventsFrame:
    """Converts trace entries to a frame. It is too slow for the decoding loop: call it in the sending thread."""
    events: list[frames.TraceEvent] = []
    for line in map(to_record, entries):
        kind = next(kind for kind in ("begin", "end", "round") if kind in line)
        events.append(frames.TraceEvent(kind, msgspec.json.encode(line, enc_hook=to_json), sorted(tokens_in(line))))
    return frames.TraceEventsFrame(events)


def engine_info(session: Session, defaults: Mapping[str, Any]) -> frames.EngineInfo:
    """Returns the properties of the models and the engine for the front end. `defaults`: sampling parameters that
    override the model's defaults."""
    llm = session.llm
    return frames.EngineInfo(
        model=session.model, draft_model=session.draft_model, max_model_len=llm.max_model_len,
        vocab_size=llm.vocab_size, eos_token_ids=list(llm.eos_token_ids), defaults={**session.model_defaults,
        **defaults},
        plan=asdict(llm.config), load_ms=round(llm.load_time * 1e3, 3),
        trace_head=llm.roles.trace_header, max_num_seqs=llm.max_num_seqs,
    )  # fmt: skip
