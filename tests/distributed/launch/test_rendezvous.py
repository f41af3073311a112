"""Rendezvous of restarted ranks, in threads on one store: each incarnation is admitted once, with the ranks that are
alive."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent, settings_of
from swiftspec.distributed.launch.rendezvous import DEAD_AFTER_S, Rendezvous, losses_at_the_end_ignored
from swiftspec.distributed.launch.startup_barrier import Timeouts
from swiftspec.distributed.launch.supervisor_link import JobEnded, RankInfo, RankTable, SupervisorLink
from swiftspec.distributed.launch.world import World
from swiftspec.distributed.remote.failover import DraftGroupRecovery
from swiftspec.distributed.transport.connections import Connections
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Transport
from swiftspec.errors import RankLost, UserError

SOON = Timeouts(timeout_s=20.0, first_log_s=0.05, log_interval_s=0.05, grace_s=10.0)
PLAN = EngineConfig(mode="async", target_tp=1, draft_tp=1)
FACTS = RankConfig(settings_of(PLAN), {"draft": "d"}, {"target": "t"})


def world(
    page: Any, rank: int, incarnation: int, size: int = 3, waiting: Timeouts = SOON, messages: list[str] | None = None
) -> World:
    log = (lambda text: None) if messages is None else messages.append
    rendezvous = Rendezvous(page, rank)
    return World(
        rank,
        size,
        rank,
        size,
        "here",
        page,
        log=log,
        timeouts=waiting,
        supervisor=SupervisorLink(incarnation),
        rendezvous=rendezvous,
    )


def rejoin(job: World) -> World:
    assert job.rendezvous is not None
    return job.after_rendezvous(job.rendezvous.rejoin(job.size, job.timeouts, job.log))


def together(*acts: Callable[[], Any]) -> list[Any]:
    """The result or exception of each function, all run concurrently."""
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


def test_every_rejoin_uses_a_new_store_prefix() -> None:
    page = HashStore()
    for incarnation in (1, 2, 3):
        worlds = together(*(lambda r=r, n=incarnation: rejoin(world(page, r, n)) for r in range(3)))
        for i, each in enumerate(worlds):
            each.store.set(f"{i} in life {incarnation}", "")
        assert all(each.store.check([f"{i} in life {incarnation}" for i in range(3)]) for each in worlds)
        assert not worlds[0].store.check([f"0 in life {incarnation - 1}"])
        assert [each.active_ranks for each in worlds] == [(0, 1, 2)] * 3


def test_an_incarnation_that_died_before_admission_is_replaced_by_the_next() -> None:
    page = HashStore()
    page.set("here 1", "dead")  # it registered, then exited
    assert Rendezvous(page, 0).try_form([1, 2]) is None
    worlds = together(*(lambda r=r: rejoin(world(page, r, 1)) for r in (1, 2, 0)))
    assert [each.active_ranks for each in worlds] == [(0, 1, 2)] * 3


def test_an_incarnation_is_admitted_once() -> None:
    page = HashStore()
    page.set("here 1", "one life")
    rendezvous = Rendezvous(page, 0)
    assert rendezvous.try_form([1]) is None, "nothing says yet that it is alive"
    page.add("count one life", 1)
    assert (
        rendezvous.try_form([1]) is not None and rendezvous.try_form([1]) is None and rendezvous.alive_ranks([1]) == {}
    )


def test_an_incarnation_without_heartbeats_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    page, now = HashStore(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    page.set("here 1", "one life")
    rendezvous = Rendezvous(page, 0)
    assert rendezvous.alive_ranks([1]) == {}
    page.add("count one life", 1)
    assert rendezvous.alive_ranks([1]) == {1: "one life"}
    now[0] += DEAD_AFTER_S + 0.1
    assert rendezvous.alive_ranks([1]) == {} and rendezvous.try_form([1]) is None
    page.add("count one life", 1)
    assert rendezvous.alive_ranks([1]) == {1: "one life"}


def test_no_request_waits_for_a_rank_0_that_has_exited() -> None:
    page = HashStore()
    waiting = together(lambda: rejoin(world(page, 1, 1)), Rendezvous(page, 0).end_job)
    assert isinstance(waiting[0], JobEnded)


@pytest.mark.parametrize(("ended", "raised"), [(False, RankLost), (True, JobEnded)])
def test_a_connection_that_closes_at_the_end_of_the_job_is_no_loss(ended: bool, raised: type[Exception]) -> None:
    """Such as that of a draft which loads its weights again while the last answer ends."""
    page = HashStore()
    if ended:
        Rendezvous(page, 0).end_job()
    with pytest.raises(raised), losses_at_the_end_ignored(Rendezvous(page, 1)):
        raise RankLost("the target group disconnected")


def test_a_waiting_rank_logs_and_times_out() -> None:
    messages: list[str] = []
    clock = partial(next, itertools.count(0.0, 0.01))  # each look at it takes 10 ms
    brief = Timeouts(timeout_s=0.2, first_log_s=0.05, log_interval_s=0.05, clock=clock)
    with pytest.raises(RankLost, match=r"rank 0 did not admit rank 2 within 0.2 s"):
        rejoin(world(HashStore(), 2, 1, waiting=brief, messages=messages))
    with pytest.raises(UserError, match=r"ranks 1 and 2 did not rejoin within 0.2 s"):
        rejoin(world(HashStore(), 0, 1, waiting=brief, messages=messages))
    assert {"rank 2 is waiting for rank 0", "waiting for ranks 1 and 2"} <= set(messages)


def test_a_restarted_draft_group_is_admitted() -> None:
    page, seen = HashStore(), list[Transport]()
    states: list[list[str]] = []
    members = RankTable(lambda now: states.append([f"{m.role} {m.state} {m.restarts}" for m in now]))
    members.update(RankInfo(rank, "target" if rank == 0 else "draft", 100 + rank, "up", 0) for rank in range(2))
    links = Connections()
    back = DraftGroupRecovery(world(page, 0, 0, 2), PLAN, FACTS, (40,), members, links).reconnector

    def leader(incarnation: int, loads: bool) -> None:
        job = rejoin(world(page, 1, incarnation, 2)).next_engine()
        check_consistent(job, PLAN, FACTS)
        connection = Connections.connect(job, PLAN).target_leader
        assert connection is not None and connection.recv(10) == (Opcode.READY, [40])
        connection.send(Opcode.READY if loads else Opcode.ERROR, [])
        seen.append(connection)

    try:
        leader(1, loads=False)
        assert back.poll() is None, "one that cannot load is not taken"
        leader(2, loads=True)
        while (connection := back.poll()) is None:
            time.sleep(0.01)
        assert links.draft_leader is connection and back.poll() is None
        connection.send(Opcode.SET_DRAFT_STEPS, [3])
        assert seen[1].recv(10) == (Opcode.SET_DRAFT_STEPS, [3])
    finally:
        back.close()
    assert states[-1][1] == "draft up 2" and "draft lost 1" in {state[1] for state in states}
    for channel in (*seen, connection):
        channel.close()
