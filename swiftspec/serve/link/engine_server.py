"""Engine server in rank 0: loads the models and decodes the requests of the front end until a shutdown is requested.

It receives requests only through the engine link to the front end. The supervisor passes a new socket whenever the
front end restarts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from swiftspec.distributed.launch.control_socket import SupervisorClient
from swiftspec.distributed.launch.supervisor_link import RankInfo, SupervisorLink
from swiftspec.errors import RankLost, UserError
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_loop import EngineLoop, engine_info
from swiftspec.serve.link.frames import FrontEndLost
from swiftspec.serve.link.frontend_process import requested_kv_events, sampling_defaults
from swiftspec.serve.link.status_publisher import LoadingPhases, StatusPublisher
from swiftspec.serve.link.target_monitor import TargetMonitor
from swiftspec.settings.settings import Settings
from swiftspec.signals import GracefulStop
from swiftspec.startup.built_in_models import served_model_names
from swiftspec.startup.remote_session import open_local_or_remote
from swiftspec.stdio import warn

if TYPE_CHECKING:
    from swiftspec.builder.remote_roles import RemoteTarget
    from swiftspec.cache.prefix_cache import TokenText
    from swiftspec.contrib.kv_events.publisher import KvEventPublisher
    from swiftspec.distributed.launch.world import World
    from swiftspec.token_engine import TokenEngine

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
    kv_events: KvEventPublisher | None = None
    try:
        try:
            kv_events = open_kv_events(settings)
            world = join(supervisor.supervision(publisher.publish_ranks))
            if world is None:
                publisher.publish_ranks([RankInfo(0, "target", os.getpid(), "up", supervisor.incarnation)])
            session = open_local_or_remote(
                settings, loading_phases, world, warm_up=True, render_chats=False, on_located=publisher.publish_target
            )
        except UserError as error:
            publisher.publish(frames.EngineLostFrame(str(error)))
            raise
        finally:
            loading_phases.close()
        will_restart = False
        try:
            defaults = {**session.model_defaults, **defaults}
            publisher.publish(engine_info(session.llm, session.model, session.draft_model, defaults))
            supervisor.set_ready()
            with GracefulStop() as stop, watched_target(session.remote_target, publisher, supervisor):
                EngineServer(
                    session.llm,
                    publisher,
                    stop,
                    supervisor,
                    send_rpc_records=settings.otlp_endpoint is not None,
                    on_cache_change=None if kv_events is None else kv_events.publish,
                ).run()
        except Exception:  # the supervisor restarts this rank and then the others
            will_restart = True
            raise
        finally:
            session.close(will_restart=will_restart)
    finally:
        if kv_events is not None:
            kv_events.close()
        publisher.socket.close(FLUSH_TIMEOUT_S)
    return 0


@contextmanager
def watched_target(
    target: RemoteTarget | None, publisher: StatusPublisher, supervisor: SupervisorClient
) -> Iterator[None]:
    """Context manager that watches the worker of a remote target. While it is lost, the front end rejects requests, and
    the state of rank 0 is "lost"."""
    if target is None:
        yield
        return

    def report(lost: str | None) -> None:
        state: Literal["lost", "up"] = "up" if lost is None else "lost"
        publisher.publish_ranks([RankInfo(0, "target", os.getpid(), state, supervisor.incarnation)])
        publisher.publish(frames.TargetStateFrame(lost))
        if lost is None:
            print(f"swiftspec: {target.connection.peer} answers again", file=sys.stderr, flush=True)
        else:
            warn(f"{lost}; requests get status 503 until it serves this server again")

    monitor = TargetMonitor(target.lost_reason, report)
    monitor.start()
    try:
        yield
    finally:
        monitor.close()


def open_kv_events(settings: Settings) -> KvEventPublisher | None:
    """Opens the publisher of KV events. Returns None without --kv-events-config. Raises UserError if an address is in
    use."""
    config = requested_kv_events(settings)
    if config is None:
        return None
    from swiftspec.contrib.kv_events.publisher import KvEventPublisher  # ZeroMQ is an optional dependency

    return KvEventPublisher(config, served_model_names(settings)[0])


class SupervisedLink:
    """Rank 0's link to the current front end. Also sends a `DrainFrame` after a signal, and marks the heartbeat."""

    def __init__(self, publisher: StatusPublisher, stop: GracefulStop, supervisor: SupervisorClient) -> None:
        self._publisher, self._stop = publisher, stop
        self._heartbeat, self._url = supervisor.heartbeat, supervisor.first_message.decode()
        self.draining = False

    def send(self, frame: frames.Frame | Callable[[], frames.Frame]) -> None:
        """See `FrameLink.send`."""
        self._publisher.socket.send(frame)

    def poll(self) -> frames.ToEngine | None:
        """See `FrameLink.poll`."""
        self._heartbeat.mark_busy()
        if self._stop.requested:
            self._drain()
        return self._received(self._publisher.socket.poll())

    def wait(self) -> frames.ToEngine | None:
        """See `FrameLink.wait`. Returns None if a signal requests a drain."""
        self._heartbeat.mark_idle()
        frame = self._publisher.socket.wait(self._stop.wakeup_fd)
        if self._stop.requested:
            self._drain()
        return self._received(frame)

    def _received(self, frame: frames.ToEngine | None) -> frames.ToEngine | None:
        if isinstance(frame, frames.ServingFrame):
            print(f"swiftspec: listening on {self._url} (a browser shows the tree there)", file=sys.stderr, flush=True)
        return frame

    def _drain(self) -> None:
        if not self.draining:
            self.draining = True
            os.read(self._stop.wakeup_fd, 1)
            with suppress(FrontEndLost):
                self.send(frames.DrainFrame())


class EngineServer:
    """Server that decodes the requests of one front end after the other. `send_rpc_records`, `on_cache_change`: see
    `EngineLoop`."""

    def __init__(
        self,
        llm: TokenEngine,
        publisher: StatusPublisher,
        stop: GracefulStop,
        supervisor: SupervisorClient,
        *,
        send_rpc_records: bool = False,
        on_cache_change: Callable[[Sequence[TokenText]], None] | None = None,
    ) -> None:
        self._publisher, self._stop = publisher, stop
        self._link = SupervisedLink(publisher, stop, supervisor)
        self._loop = EngineLoop(llm, self._link, send_rpc_records=send_rpc_records, on_cache_change=on_cache_change)

    def run(self) -> None:
        """Serves until the front end sends `ShutdownFrame` or is lost during a drain. Raises RankLost if a rank fails
        during decoding."""
        while not self._loop.shutting_down:
            try:
                self._loop.run()
            except FrontEndLost:
                self._loop.reset()
                if self._link.draining or not self._publisher.reconnect(self._stop.wakeup_fd):
                    return
            except RankLost as error:
                with suppress(FrontEndLost):
                    self._link.send(frames.EngineLostFrame(str(error)))
                raise
