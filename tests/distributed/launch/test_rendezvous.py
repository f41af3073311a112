"""Ranks that were started again, in threads on one store: each life is called once, with those that are alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from swiftspec.config import EngineConfig
from swiftspec.distributed.draft.recovery import Comeback
from swiftspec.distributed.launch.config_check import Facts, agree, settings_of
from swiftspec.distributed.launch.rendezvous import GONE, Meetings
from swiftspec.distributed.launch.startup_barrier import Waiting
from swiftspec.distributed.launch.supervision import JobOver, Keeping, Member, Members
from swiftspec.distributed.launch.world import World, meet_again
from swiftspec.distributed.transport.channel import Channel
from swiftspec.distributed.transport.connections import Links
from swiftspec.distributed.transport.opcodes import Call
from swiftspec.errors import RankLost, UserError

SOON = Waiting(timeout=20.0, silent=0.05, again=0.05, grace=10.0)
BRIEF = Waiting(timeout=0.2, silent=0.05, again=0.05, grace=0.2)
PLAN = EngineConfig(mode="async", target_tp=1, draft_tp=1)
FACTS = Facts(settings_of(PLAN), {"draft": "d"}, {"target": "t"})


def world(
    page: Any, rank: int, life: int, size: int = 3, waiting: Waiting = SOON, said: list[str] | None = None
) -> World:
    say = (lambda text: None) if said is None else said.append
    meetings = Meetings(page, rank)
    return World(
        rank, size, rank, size, "here", page, say=say, waiting=waiting, keeping=Keeping(life), meetings=meetings
    )


def together(*acts: Callable[[], Any]) -> list[Any]:
    """What each act returns, or raises, when all run at the same time."""
    found: list[Any] = [None] * len(acts)

    def run(i: int, act: Callable[[], Any]) -> None:
        try:
            found[i] = act()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_ranks_meet_again_on_a_page_of_their_own() -> None:
    page = HashStore()
    for life in (1, 2, 3):
        worlds = together(*(lambda r=r, n=life: meet_again(world(page, r, n)) for r in range(3)))
        for i, each in enumerate(worlds):
            each.store.set(f"{i} in life {life}", "")
        assert all(each.store.check([f"{i} in life {life}" for i in range(3)]) for each in worlds)
        assert not worlds[0].store.check([f"0 in life {life - 1}"])
        assert [each.present for each in worlds] == [(0, 1, 2)] * 3


def test_a_life_that_died_before_it_was_called_is_replaced_by_the_next() -> None:
    page = HashStore()
    page.set("here 1", "dead")  # it said so, and died
    assert Meetings(page, 0).call([1, 2]) is None
    worlds = together(*(lambda r=r: meet_again(world(page, r, 1)) for r in (1, 2, 0)))
    assert [each.present for each in worlds] == [(0, 1, 2)] * 3


def test_a_life_is_called_once() -> None:
    page = HashStore()
    page.set("here 1", "one life")
    meetings = Meetings(page, 0)
    assert meetings.call([1]) is None, "nothing says yet that it is alive"
    page.add("count one life", 1)
    assert meetings.call([1]) is not None and meetings.call([1]) is None and meetings.here([1]) == {}


def test_a_life_that_counts_no_more_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    page, now = HashStore(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    page.set("here 1", "one life")
    meetings = Meetings(page, 0)
    assert meetings.here([1]) == {}
    page.add("count one life", 1)
    assert meetings.here([1]) == {1: "one life"}
    now[0] += GONE + 0.1
    assert meetings.here([1]) == {} and meetings.call([1]) is None
    page.add("count one life", 1)
    assert meetings.here([1]) == {1: "one life"}


def test_nobody_waits_for_a_rank_0_that_has_left() -> None:
    page = HashStore()
    waiting = together(lambda: meet_again(world(page, 1, 1)), Meetings(page, 0).end)
    assert isinstance(waiting[0], JobOver)


def test_who_waits_says_so_and_gives_up() -> None:
    said: list[str] = []
    with pytest.raises(RankLost, match=r"rank 0 did not call rank 2 within 0.2 s"):
        meet_again(world(HashStore(), 2, 1, waiting=BRIEF, said=said))
    with pytest.raises(UserError, match=r"ranks 1 and 2 did not come again within 0.2 s"):
        meet_again(world(HashStore(), 0, 1, waiting=BRIEF, said=said))
    assert {"rank 2 is waiting for rank 0", "waiting for ranks 1 and 2"} <= set(said)


def test_a_draft_group_comes_back() -> None:
    page, seen = HashStore(), list[Channel]()
    states: list[list[str]] = []
    members = Members(lambda now: states.append([f"{m.role} {m.state} {m.restarts}" for m in now]))
    members.take(Member(rank, "target" if rank == 0 else "draft", 100 + rank, "up", 0) for rank in range(2))
    links = Links()
    back = Comeback(world(page, 0, 0, 2), PLAN, FACTS, 40, members, links)

    def leader(life: int, loads: bool) -> None:
        here = meet_again(world(page, 1, life, 2)).next_job()
        agree(here, PLAN, FACTS)
        bridge = Links.connect(here, PLAN).target
        assert bridge is not None and bridge.recv(10) == (Call.READY, [40])
        bridge.send(Call.READY if loads else Call.LOST, [])
        seen.append(bridge)

    try:
        leader(1, loads=False)
        assert back.take() is None, "one that cannot load is not taken"
        leader(2, loads=True)
        while (bridge := back.take()) is None:
            time.sleep(0.01)
        assert links.drafts is bridge and back.take() is None
        bridge.send(Call.STEPS, [3])
        assert seen[1].recv(10) == (Call.STEPS, [3])
    finally:
        back.close()
    assert states[-1][1] == "draft up 2" and "draft lost 1" in {state[1] for state in states}
    for channel in (*seen, bridge):
        channel.close()
