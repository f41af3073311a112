"""Tensor-parallel worker: serves one model that is sharded over a group of ranks.

Every rank has all sessions, each with its own KV cache, and executes the same calls in the same order (see
group/leader.py). When rank 0 switches to the calls of another session, it first sends SESSION_SELECT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.distributed.group.follower_dispatch import Action, FollowerDispatcher
from swiftspec.distributed.group.leader import FollowerGroup
from swiftspec.distributed.transport.codec import (
    Message,
    Words,
    masked_from_json,
    shape_from_json,
    shape_to_json,
    single_word,
    text_to_words,
    words_to_text,
)
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost

EXIT_POLL_S = 0.2  # seconds within which the exit of a follower is detected


class WorkerGroup:
    """The followers of a worker's rank 0, and the sessions on them.

    Followers receive SESSION_OPEN before the first call of a session. They keep the KV cache of an ended session until
    calls of another session follow, and then receive SESSION_CLOSE first, so the number of KV caches never exceeds the
    worker's session limit. `new_session` and `end_session` may be called in any thread; all other methods require the
    model lock.

    `broken`: the reason why the group cannot continue, or None.
    """

    def __init__(self, followers: Sequence[Transport], on_first_round: Callable[[], None] = lambda: None) -> None:
        """`on_first_round`: called when the first round of each session has ended."""
        self.followers, self.on_first_round = followers, on_first_round
        self.broken: str | None = None
        self._on_lost: Callable[[str], None] = lambda why: None
        self._count = 0
        self._selected: SessionFollowerGroup | None = None  # the session whose calls the followers execute
        self._ended: list[SessionFollowerGroup] = []

    def new_session(self, shape: EngineConfig, masked: tuple[int, ...]) -> SessionFollowerGroup:
        """Returns the follower group of a new session. `shape`: config of the session's rounds. `masked`: tokens that
        a draft never proposes."""
        self._count += 1
        return SessionFollowerGroup(self, self._count, shape, masked)

    def end_session(self, team: SessionFollowerGroup) -> None:
        """Marks a session as ended. The followers free its KV cache at the next change of the selected session."""
        self._ended.append(team)

    def select_session(self, team: SessionFollowerGroup) -> None:
        """Makes `team` the session whose calls the followers execute next: closes ended sessions, and opens `team` on
        the followers if necessary. Raises ConnectionError if a follower is gone."""
        if self._selected is team:
            return
        while self._ended:
            over = self._ended.pop()
            if over.opened:
                self._send(Opcode.SESSION_CLOSE, [over.number])
        if not team.opened:
            config = {"shape": shape_to_json(team.shape), "masked_tokens": team.masked}
            self._send(Opcode.SESSION_OPEN, [team.number, *text_to_words(json.dumps(config))])
            team.opened = True
        self._send(Opcode.SESSION_SELECT, [team.number])
        self._selected = team

    def on_lost(self, lost: Callable[[str], None]) -> None:
        """Registers a callback that is called with the reason when the group breaks, or immediately if it is broken
        already."""
        self._on_lost = lost
        if self.broken is not None:
            lost(self.broken)

    def check_followers(self, timeout_s: float = EXIT_POLL_S) -> None:
        """Marks the group as broken if a follower is gone. Polls each channel for `timeout_s` seconds; a
        follower that is alive sends no messages on it."""
        for follower in self.followers:
            try:
                follower.recv(timeout_s)
            except TimeoutError:
                continue
            except ConnectionError as error:
                self.mark_broken(str(error))

    def mark_broken(self, why: str) -> None:
        """Marks the group as broken for the reason `why`: its ranks may no longer be in the same state."""
        if self.broken is None:
            self.broken = why
            self._on_lost(why)

    def _send(self, call: Opcode, words: Words) -> None:
        for follower in self.followers:
            follower.send(call, words)


class SessionFollowerGroup(FollowerGroup):
    """The follower group of one session: before each call, selects the session on the followers. `opened`: whether they
    have received SESSION_OPEN."""

    def __init__(self, workers: WorkerGroup, number: int, shape: EngineConfig, masked: tuple[int, ...]) -> None:
        super().__init__(workers.followers, workers.on_first_round)
        self.number, self.shape, self.masked, self.opened = number, shape, masked, False
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
    """The sessions of a follower. Decodes session commands, and passes all other commands to the dispatcher of the
    selected session. `make`: returns the dispatcher of a new session with the given config and masked tokens."""

    def __init__(self, make: Callable[[EngineConfig, tuple[int, ...]], FollowerDispatcher]) -> None:
        self._make = make
        self._sessions: dict[int, FollowerDispatcher] = {}
        self._selected: FollowerDispatcher | None = None

    def decode(self, kind: int, words: Words) -> Action:
        """Returns a function that executes the command with opcode `kind`. Raises ValueError if the command is
        invalid."""
        match kind:
            case Opcode.SESSION_OPEN:
                number, config = words[0] if words else 0, _session_config(words[1:])
                if number in self._sessions:
                    raise ValueError(f"session {number} is already open")
                return partial(self._open, number, *config)
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

    def _open(self, number: int, shape: EngineConfig, masked: tuple[int, ...]) -> None:
        self._sessions[number] = self._make(shape, masked)

    def _find(self, words: Words) -> FollowerDispatcher:
        number = single_word(words, "session")
        if number not in self._sessions:
            raise ValueError(f"session {number} does not exist")
        return self._sessions[number]


def _session_config(words: Words) -> tuple[EngineConfig, tuple[int, ...]]:
    """Returns the config of a session's rounds and the tokens that a draft never proposes."""
    try:
        values: dict[str, Any] = dict(json.loads(words_to_text(words)))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("a session's configuration is not valid JSON") from None
    return shape_from_json(values.get("shape")), masked_from_json(values.get("masked_tokens"))
