"""Tensor-parallel worker: serves one model that is sharded over a group of ranks.

Every rank has all sessions, each with its own KV cache, and executes the same calls in the same order, see
group/leader.py. Rank 0 sends SESSION_SELECT before it switches to the calls of another session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.join import RankGroup, join_group
from swiftspec.distributed.group.command_stream import CommandStream
from swiftspec.distributed.group.follower_dispatch import Action, FollowerDispatcher
from swiftspec.distributed.group.leader import FollowerGroup, dispatch_loop
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent, report_startup_error
from swiftspec.distributed.launch.supervision import Heartbeat
from swiftspec.distributed.launch.world import World, pin_to_cores
from swiftspec.distributed.rank_startup import RoleBuilder
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.codec import Message, Words, single_word, text_to_words, words_to_text
from swiftspec.distributed.transport.connections import Connections
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.errors import RankLost, UserError
from swiftspec.runtime.cancellation import CancelCheck

SHAPE_FIELDS = (
    "mode", "verify_batch", "draft_leaves", "draft_steps", "verify", "proposal", "calibration", "catch_up",
    "adapt_steps",
)  # fmt: skip
EXIT_POLL_S = 0.2  # seconds within which the exit of a process is detected
MakeFollower = Callable[
    [EngineConfig, CancelCheck], FollowerDispatcher
]  # returns the roles of a session with that config, on their own KV caches


class WorkerGroup:
    """The followers of a worker's rank 0.

    Followers receive SESSION_OPEN when a session first acquires the model, and SESSION_CLOSE when another session next
    does. Until then they keep its KV cache; the total never exceeds the worker's session limit. Sessions may begin and
    end in any thread; all other methods require the model lock.

    `broken`: the reason why the group cannot continue, or None.
    """

    def __init__(self, followers: Sequence[Channel]) -> None:
        self.followers = followers
        self.broken: str | None = None
        self._on_lost: Callable[[str], None] = lambda why: None
        self._count = 0
        self._selected: SessionFollowerGroup | None = None  # the session whose calls the followers execute
        self._ended: list[SessionFollowerGroup] = []

    def new_session(self, shape: EngineConfig) -> SessionFollowerGroup:
        """Creates the follower group of a new session."""
        self._count += 1
        return SessionFollowerGroup(self, self._count, shape)

    def end_session(self, team: SessionFollowerGroup) -> None:
        """Marks a session as ended; the followers free its KV cache with the next session change."""
        self._ended.append(team)

    def select_session(self, team: SessionFollowerGroup) -> None:
        """Selects the session whose calls follow. Raises ConnectionError if a follower is gone."""
        if self._selected is team:
            return
        while self._ended:
            over = self._ended.pop()
            if over.opened:
                self._send(Opcode.SESSION_CLOSE, [over.number])
        if not team.opened:
            values = {name: getattr(team.shape, name) for name in SHAPE_FIELDS}
            self._send(Opcode.SESSION_OPEN, [team.number, *text_to_words(json.dumps(values))])
            team.opened = True
        self._send(Opcode.SESSION_SELECT, [team.number])
        self._selected = team

    def on_lost(self, lost: Callable[[str], None]) -> None:
        """Registers a callback that receives the reason when the group breaks; called immediately if it is broken."""
        self._on_lost = lost
        if self.broken is not None:
            lost(self.broken)

    def check_followers(self, patience: float = EXIT_POLL_S) -> None:
        """Detects lost followers by polling their channels, on which a healthy follower sends nothing."""
        for follower in self.followers:
            try:
                follower.recv(patience)
            except TimeoutError:
                continue
            except ConnectionError as error:
                self.mark_broken(str(error))

    def mark_broken(self, why: str) -> None:
        """Marks the group as broken: the ranks may no longer be in the same state."""
        if self.broken is None:
            self.broken = why
            self._on_lost(why)

    def _send(self, call: Opcode, words: Words) -> None:
        for follower in self.followers:
            follower.send(call, words)


class SessionFollowerGroup(FollowerGroup):
    """The followers in one session. `opened`: whether they have received SESSION_OPEN."""

    def __init__(self, workers: WorkerGroup, number: int, shape: EngineConfig) -> None:
        super().__init__(workers.followers)
        self.number, self.shape, self.opened = number, shape, False
        self._group = workers

    def broadcast(self, call: Opcode, message: Message | None = None) -> None:
        if self._group.broken is not None:
            raise RankLost(self._group.broken)
        try:
            self._group.select_session(self)
        except ConnectionError as error:
            raise self.translate_error(call, error) from None
        super().broadcast(call, message)

    def translate_error(self, call: Opcode, error: BaseException) -> BaseException:
        error = super().translate_error(call, error)
        if self.broken is not None:
            self._group.mark_broken(self.broken)
        return error


class FollowerSessionRegistry:
    """Dispatcher of a follower's sessions: executes session commands and forwards others to the selected one."""

    def __init__(self, make: Callable[[EngineConfig], FollowerDispatcher]) -> None:
        self._make = make
        self._sessions: dict[int, FollowerDispatcher] = {}
        self._selected: FollowerDispatcher | None = None

    def decode(self, kind: int, words: Words) -> Action:
        """Returns the call that a message requests. Raises ValueError if the message is invalid."""
        match kind:
            case Opcode.SESSION_OPEN:
                number, shape = words[0] if words else 0, _shape(words[1:])
                if number in self._sessions:
                    raise ValueError("a session is opened twice")
                return partial(self._open, number, shape)
            case Opcode.SESSION_SELECT:
                self._selected = self._find(words)
                return lambda: None
            case Opcode.SESSION_CLOSE:
                gone = self._find(words)
                self._selected = None if self._selected is gone else self._selected
                return partial(self._sessions.pop, words[0])
            case _ if self._selected is None:
                raise ValueError("no session is open")
            case _:
                return self._selected.decode(kind, words)

    def _open(self, number: int, shape: EngineConfig) -> None:
        self._sessions[number] = self._make(shape)

    def _find(self, words: Words) -> FollowerDispatcher:
        number = single_word(words, "session")
        if number not in self._sessions:
            raise ValueError("there is no such session")
        return self._sessions[number]


def _shape(words: Words) -> EngineConfig:
    try:
        return EngineConfig(**json.loads(words_to_text(words)))
    except (ValueError, TypeError, UserError) as error:
        raise ValueError(f"a session's shape makes no sense ({str(error)[:200]})") from None


class WorkerRank:
    """One rank of a tensor-parallel worker. The constructor returns once all ranks have loaded their shards.

    It checks that all ranks have the same configuration, connects this rank, joins the group and calls `load`. Raises
    UserError on all ranks if configurations differ. If a rank cannot load, rank 0 raises UserError and the other ranks
    shut down.

    `executor_names`: executors that this rank supports; on rank 0, which selects one, those that all ranks support.
    """

    def __init__(
        self, world: World, plan: EngineConfig, builder: RoleBuilder, settings: Mapping[str, Any],
        load: Callable[[Any, RankGroup], set[str]],
    ) -> None:  # fmt: skip
        """`settings`: further values that must be equal on all ranks.

        `load` loads this rank's shard and returns the names of the executors that it supports."""
        held = {"target": plan.mode == "ar", "draft": plan.mode != "ar"}
        with report_startup_error(world):
            facts = builder.rank_config(plan, **held)
        self._world = world = world.next_engine()
        check_consistent(world, plan, RankConfig({**facts.settings, **settings}, facts.files, facts.group_files))
        self._connections = Connections.connect(world, plan)
        vocab = self._connections.broadcast_value(builder.vocab_size)
        self._group: RankGroup | None = None
        error, kinds = None, set[str]()
        try:
            builder = builder.with_vocab(vocab)
            self._group = join_group(
                world, "target", world.rank, world.size, device=builder.device, share_device=builder.share_device,
                width=builder.kernel_sums(**held),
            )  # fmt: skip
            kinds = load(builder, self._group)
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # such as a lack of memory or a disk error: rank 0 reports it
            error = f"rank {world.rank} cannot start: {str(problem) or type(problem).__name__}"
        try:
            self.executor_names = self._connections.wait_ready(error, kinds)
        except UserError:
            self.leave()
            raise
        self.worker_group = WorkerGroup(self._connections.followers)

    def run_follower(self, make: MakeFollower) -> None:
        """Main loop of every rank except rank 0, until SHUTDOWN. Raises RankLost if rank 0 is gone without SHUTDOWN."""
        leader = self._connections.leader
        assert leader is not None
        orders = CommandStream(leader)

        def made(shape: EngineConfig) -> FollowerDispatcher:
            pause = CancelCheck()
            pause.cancelled = orders.prefill_aborted
            return make(shape, pause)

        try:
            dispatch_loop(leader, orders, FollowerSessionRegistry(made).decode, Heartbeat())
        finally:
            self.leave()

    def leave(self) -> None:
        """Leaves the group; on rank 0, first sends SHUTDOWN to the others."""
        self._connections.close(shutdown=True)
        pin_to_cores(set(self._world.cores))
        if self._group is not None:
            self._group.close()
            self._group = None
