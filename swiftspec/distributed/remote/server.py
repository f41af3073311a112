"""Server of one client: receives its messages, executes them on a role and yields the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.leader import LeaderDrafter
from swiftspec.distributed.launch.supervisor_link import Heartbeat
from swiftspec.distributed.remote.served_roles import DraftTraceSender, ServedDrafter, ServedRole
from swiftspec.distributed.remote.session_messages import Answer, ErrorCode, pack_error
from swiftspec.distributed.transport.channels import ChannelSet, ReceiveCall
from swiftspec.distributed.transport.codec import Frame
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, StaleRound
from swiftspec.distributed.transport.transport import Receiver, Transport
from swiftspec.errors import RankLost, UserError
from swiftspec.file_io import one_line
from swiftspec.runtime.cancellation import CancelCheck, Cancelled
from swiftspec.runtime.coroutines import EXPANSION, PREFILL, CallQueue, RequestCoroutine, joint_calls, suspend
from swiftspec.runtime.fallback_drafter import FAILURES

MAX_EXPANSIONS_BEFORE_PREFILL = 4  # joint expansions while a new request waits for its next prefill chunk


class SessionServer(ABC):
    """Loop of a server: message, validation, execution, answers, and then the work that the answers did not depend on.

    `role`: role that executes the messages; None until the client has a session.
    """

    def __init__(self, receiver: Receiver, role: ServedRole | None = None) -> None:
        self.role = role
        self._commands = CommandStream(receiver)
        self._ended = False

    def answers(self) -> Iterator[Answer]:
        """Yields the answers until the client ends. Raises ConnectionError if it is lost."""
        while not self._ended:
            frame = None
            try:
                frame = self._next()
                yield from self._execute(frame)
            except ConnectionError:
                raise
            except Exception as error:
                yield from self._on_error(error, frame)

    def _next(self) -> Frame | None:
        """Returns opcode and words of the next message. Returns None if the role has work due; a role that streams tree
        deltas is interrupted by a message that has arrived."""
        if self.role is None or not self.role.work_due:
            return self._commands.recv()
        if not self.role.streams_deltas:
            return None
        try:
            return self._commands.recv(0.0)
        except TimeoutError:
            return None

    @abstractmethod
    def _execute(self, frame: Frame | None) -> Iterable[Answer]:
        """Executes a message, or without one the work that is due, and returns the answers."""

    @abstractmethod
    def _on_error(self, error: Exception, frame: Frame | None) -> Iterable[Answer]:
        """Returns the answers after an exception of `_next` or `_execute`, or raises an exception that ends the
        server."""

    def _error_answer(self, error: Exception, frame: Frame | None, code: ErrorCode = ErrorCode.FAILED) -> list[Answer]:
        """Returns the answer that reports an error instead of the answer to `frame`, or of the work that was due."""
        place = (0, 0, 0)
        code = ErrorCode.STALE if isinstance(error, StaleRound) else code
        if frame is None:
            if self.role is not None:
                place = self.role.state.request, self.role.state.round, self.role.state.prefix_len
        elif frame[0] in (Opcode.OBSERVE, Opcode.VERIFY) and len(frame[1]) >= 3:
            request, round_, prefix_len = frame[1][:3]
            place = request, min(round_ + (frame[0] == Opcode.OBSERVE), 2**31 - 1), prefix_len
        elif frame[0] in (Opcode.DRAFTER_OPEN, Opcode.VERIFIER_OPEN) and frame[1]:
            place = frame[1][0], 0, 0
        return [Answer(Opcode.ERROR, pack_error(place, code, one_line(error)))]


class DraftGroupServer(SessionServer):
    """Server on the draft group's leader: its one client is the target's leader (paper section 3.1).

    If the last token of a result is a node of the tree and no expansion is due before the next proposal, native code
    sends that proposal as soon as the result arrives. The drafter then applies the result in Python, while the target
    already verifies the proposal.
    """

    role: ServedDrafter
    alone = True  # whether no other request is running on this rank

    def __init__(
        self,
        target: Transport,
        drafter: LeaderDrafter,
        limits: ModelLimits,
        recording: DraftTraceSender,
        cancel_check: CancelCheck,
        heartbeat: Heartbeat,
        *,
        on_error: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """`target`: transport to the target's leader.

        `limits`: limits against which messages are validated.
        `cancel_check`: cancellation check of the draft's runner during prefill.
        `heartbeat`: records when this rank is busy.
        `on_error`: called with each error before it is answered or raised. An error that it raises ends `run`;
            otherwise a broken draft group keeps running and answers every request with an error.
        """
        super().__init__(target, ServedDrafter(drafter, limits, cancel_check, recording=recording))
        self._target, self._drafter, self._recording = target, drafter, recording
        self._heartbeat, self._notify = heartbeat, on_error
        self._answered = False  # whether native code has answered the last message
        cancel_check.cancelled = self.request_ended

    def request_ended(self) -> bool:
        """Returns whether the target has ended the request whose prompt is being prefilled."""
        return self._commands.request_ended()

    def run(self) -> None:
        """Executes the target's messages until SHUTDOWN. A failure of the draft model ends only the current request.

        Raises RankLost if the target is gone without SHUTDOWN or sends an invalid message.
        """
        try:
            for answer in self.answers():
                self._target.send(*answer.frame())
        except ConnectionError as error:
            if not self._commands.received_shutdown():  # a prefill may have buffered it
                raise RankLost(str(error)) from None

    def _next(self) -> Frame | None:
        self._answered = False
        if self.role.work_due:
            return None
        self._heartbeat.mark_idle()
        native = (
            self.alone and self.role.state.is_open and self._recording.native_replies and not self._commands.buffered
        )
        reply = self._drafter.fast_reply() if native else None
        if reply is None:
            frame = self._commands.recv()
        else:
            spent = self.role.unreported_us
            kind, words, self._answered = self._target.recv_or_reply(reply, Opcode.OBSERVE, Opcode.PROPOSAL, spent)
            self.role.report_us(spent if self._answered else 0)
            frame = kind, words
        self._heartbeat.mark_busy()
        return frame

    def _execute(self, frame: Frame | None) -> Iterable[Answer]:
        if frame is None:
            return self.role.work_ahead()
        if frame[0] == Opcode.SHUTDOWN:
            self._ended = True
            return ()
        return self.role.decode(*frame, answered=self._answered)()

    def _on_error(self, error: Exception, frame: Frame | None) -> Iterable[Answer]:
        self._notify(error)
        if isinstance(error, Cancelled):
            return ()
        if isinstance(error, ValueError) and not isinstance(error, StaleRound):
            raise RankLost(f"{self._target.peer} sent an invalid message: {error}") from None
        if not isinstance(error, (StaleRound, RankLost, UserError, *FAILURES)):
            raise error
        return self._error_answer(error, frame)


class ConcurrentDraftGroupServer:
    """Server of concurrent requests on the draft group's leader. Every request has a channel, a drafter and a
    `DraftGroupServer` of its own, which runs as a coroutine.

    Messages are read between two forwards, so a result is answered before the trees of other requests are expanded
    further. The expansions of all trees run as one forward. A prefill chunk of a new request runs while no tree is
    expanded, and at the latest after MAX_EXPANSIONS_BEFORE_PREFILL expansions.
    """

    def __init__(
        self,
        channels: ChannelSet,
        servers: Sequence[DraftGroupServer],
        calls: CallQueue,
        cancel_check: CancelCheck,
        heartbeat: Heartbeat,
    ) -> None:
        """`channels`: those of the transport to the target's leader; `servers`: of each of them.
        `calls`: of the drafters' runners.
        `cancel_check`: cancellation check of these runners during prefill.
        `heartbeat`: records when this rank is busy.
        """
        self._channels, self._servers, self._calls, self._heartbeat = channels, servers, calls, heartbeat
        self._requests = [RequestCoroutine(server.run) for server in servers]
        self._resumed = servers[0]  # whose coroutine was resumed last
        self._expansions = 0  # joint forwards since the last prefill chunk
        cancel_check.cancelled = lambda: self._resumed.request_ended()

    def run(self) -> None:
        """Serves all requests until SHUTDOWN. Raises RankLost as `DraftGroupServer.run` does."""
        try:
            while self._resume_all():
                self._run_calls()
        finally:
            for each in self._requests:
                each.end()

    def _resume_all(self) -> bool:
        """Runs all requests until each waits for a message or a forward. Returns False after SHUTDOWN."""
        self._calls.company = sum(map(_is_running, self._servers, self._requests)) > 1
        for server, each in zip(self._servers, self._requests, strict=True):
            server.alone = not self._calls.company
            if each.waiting is None:
                self._resumed = server
                each.waiting = each.resume()
                if each.waiting is None:
                    return False
        return True

    def _run_calls(self) -> None:
        """Receives messages, and then runs the next forward unless a message has ended the wait of a request."""
        idle = [each for each in self._requests if isinstance(each.waiting, ReceiveCall)]
        working = [each for each in self._requests if each not in idle]
        self._receive(block=not working)
        ended = [each for each in idle if isinstance(each.waiting, ReceiveCall) and each.waiting.ended]
        for each in ended or self._run_forward(working):
            each.waiting = None

    def _receive(self, *, block: bool) -> None:
        """Receives the messages that have arrived, or with `block` waits for one. An error ends the wait of all
        requests."""
        if block:
            self._heartbeat.mark_idle()
        try:
            if block:
                self._channels.receive()
            self._channels.receive_available()
        except (ConnectionError, ValueError) as error:
            waits = [each.waiting for each in self._requests if isinstance(each.waiting, ReceiveCall)]
            if not waits:
                raise RankLost(str(error)) from None
            for each in waits:
                each.error = error
        self._heartbeat.mark_busy()

    def _run_forward(self, working: Sequence[RequestCoroutine]) -> Sequence[RequestCoroutine]:
        """Runs a forward for some of the requests that wait for one. Returns these."""
        if not working:
            return ()
        chosen = joint_calls(working)
        prefills = [each for each in working if each.waiting is not None and each.waiting.priority == PREFILL]
        expands = chosen[0].waiting is not None and chosen[0].waiting.priority == EXPANSION
        self._expansions += expands  # their results are read before the next forward
        if prefills and (chosen[0] in prefills or (expands and self._expansions > MAX_EXPANSIONS_BEFORE_PREFILL)):
            chosen, self._expansions = prefills[:1], 0
        self._calls.run([each.waiting for each in chosen if each.waiting is not None])
        return chosen


def _is_running(server: DraftGroupServer, request: RequestCoroutine) -> bool:
    """Returns whether a request is open, or executes a message, such as its start."""
    return server.role.state.is_open or not isinstance(request.waiting, ReceiveCall)


def suspend_until_received(call: ReceiveCall) -> None:
    """Suspends a request of a server until its channel has a message. Raises the error of the call, unless a message
    came before it."""
    suspend(call)
    if call.error is not None and not call.channel.unread:
        raise call.error
