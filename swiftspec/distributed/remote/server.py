"""Server of one client: receives its messages, executes them on a role and yields the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.leader import LeaderDrafter
from swiftspec.distributed.launch.supervisor_link import Heartbeat
from swiftspec.distributed.remote.served_roles import DraftTraceSender, ServedDrafter, ServedRole
from swiftspec.distributed.remote.session_messages import Answer, ErrorCode, pack_error
from swiftspec.distributed.transport.codec import Frame
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.request_state import ModelLimits, StaleRound
from swiftspec.distributed.transport.transport import Receiver, Transport
from swiftspec.errors import RankLost, UserError
from swiftspec.file_io import one_line
from swiftspec.runtime.cancellation import CancelCheck, Cancelled
from swiftspec.runtime.fallback_drafter import FAILURES


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
        cancel_check.cancelled = self._commands.request_ended

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
        native = self.role.state.is_open and self._recording.native_replies and not self._commands.buffered
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
