"""Startup barrier, with ranks in threads on one store: all continue or none does, and waiting ranks are logged."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.config_check import RankConfig, check_consistent, report_startup_error, settings_of
from swiftspec.distributed.launch.startup_barrier import StartupBarrier, Timeouts, describe_difference, format_ranks
from swiftspec.distributed.launch.world import World, require_equal
from swiftspec.errors import RankLost, UserError

SOON = Timeouts(timeout_s=60.0, first_log_s=5.0, log_interval_s=30.0, grace_s=0.3)
PLAN = EngineConfig(mode="async", target_tp=1, draft_tp=1)
FACTS = RankConfig(settings_of(PLAN) | {"dtype": "bfloat16", "trace": False}, {"draft": "d" * 64}, {"target": "t" * 64})


def store() -> Any:
    made = HashStore()
    made.set_timeout(timedelta(seconds=20))
    return made


def outcomes(*acts: Callable[[], object]) -> list[str]:
    """The result of each function, all run concurrently: `fine`, or its error."""
    found = ["still there"] * len(acts)

    def run(i: int, act: Callable[[], object]) -> None:
        try:
            act()
            found[i] = "fine"
        except (UserError, RankLost) as error:
            found[i] = str(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def start(worlds: list[World], *each: tuple[EngineConfig, RankConfig]) -> list[str]:
    return outcomes(*(lambda w=w, e=e: check_consistent(w, *e) for w, e in zip(worlds, each)))


def hours_after(arrived: Callable[[], bool] = lambda: True) -> Timeouts:
    """Timeouts of a rank whose clock stands still until `arrived`, and then advances by an hour with each reading."""
    hours = itertools.count(1)
    return replace(SOON, timeout_s=4 * 3600.0, clock=lambda: next(hours) * 3600.0 if arrived() else 0.0)


def job(size: int, messages: list[str] | None = None, waiting: Timeouts = SOON, page: Any = None) -> list[World]:
    page = page or store()
    log = (lambda text: None) if messages is None else messages.append
    return [World(r, size, r, size, "here", page, log=log, timeouts=waiting) for r in range(size)]


def test_ranks_with_equal_configurations_are_released() -> None:
    assert start(job(2), (PLAN, FACTS), (PLAN, replace(FACTS, group_files={}))) == ["fine"] * 2, "no weights needed"


DIFFERENT = [
    ({"mode": "serial"}, "rank 1 was started with mode serial, rank 0 with mode async: start all ranks with the same"),
    ({"draft_steps": 5}, "rank 1 was started with draft_steps 5, rank 0 with draft_steps unset:"),
    ({"dtype": "float32"}, "rank 1 was started with dtype float32, rank 0 with dtype bfloat16:"),
    ({"particles": 9}, "rank 1 was started with particles 9, rank 0 with particles 4:"),
    ({"trace": True}, "rank 1 was started with trace true, rank 0 with trace false:"),
    ({"ops": "x" * 999}, f"rank 1 was started with ops {'x' * 60}..., rank 0 with ops unset:"),
]


@pytest.mark.parametrize(("values", "line"), DIFFERENT, ids=lambda value: str(value)[:20])
def test_every_difference_is_named_with_both_values(values: dict[str, Any], line: str) -> None:
    other = replace(FACTS, settings={**FACTS.settings, **values})
    both = start(job(2), (PLAN, FACTS), (PLAN, other))
    assert both[0] == both[1] and both[0].startswith(line)


def test_a_config_difference_is_reported_while_another_rank_is_missing() -> None:
    plan = EngineConfig(mode="async", target_tp=2, draft_tp=1)
    facts = replace(FACTS, settings=settings_of(plan))
    other = EngineConfig(mode="serial", target_tp=3)
    found = start(job(3)[:2], (plan, facts), (other, replace(FACTS, settings=settings_of(other))))
    assert all("rank 1 was started with mode serial, rank 0 with mode async" in line for line in found)


def test_the_draft_must_be_equal_on_all_ranks_and_the_target_within_its_group() -> None:
    other = replace(FACTS, files={"draft": "e" * 64})
    assert start(job(2), (PLAN, FACTS), (PLAN, other))[0].startswith(
        "rank 1 and rank 0 have different files of the draft model: use the same model directories on all ranks"
    )
    plan = EngineConfig(mode="async", target_tp=2, draft_tp=1)
    facts = replace(FACTS, settings=settings_of(plan))
    apart, none = replace(facts, group_files={"target": "u" * 64}), replace(facts, group_files={})
    found = start(job(3), (plan, facts), (plan, apart), (plan, none))
    assert set(found) == {
        "rank 1 and rank 0 have different files of the target model: use the same model directories on all ranks"
    }


def test_an_error_of_one_rank_ends_all() -> None:
    worlds = job(2)

    def refused() -> None:
        with report_startup_error(worlds[1]):
            raise UserError("--model /nowhere: no such directory")

    def goes_on() -> None:
        check_consistent(worlds[0].next_engine(), PLAN, FACTS)

    assert outcomes(goes_on, refused) == [
        "rank 1: --model /nowhere: no such directory", "--model /nowhere: no such directory",
    ]  # fmt: skip


def test_rank_0_stays_until_the_others_have_read_why_it_cannot_start() -> None:
    """The store ends with it."""
    worlds, order = job(3, waiting=replace(SOON, grace_s=20.0)), list[str]()

    def refused(rank: int) -> None:
        with report_startup_error(worlds[rank]):
            raise UserError("no usable NVIDIA GPU")

    def first() -> None:
        try:
            refused(0)
        finally:
            order.append("rank 0 left")

    def second() -> None:
        world = worlds[1].next_engine()
        while not world.barrier("start").store.check(["verdict"]):
            time.sleep(0.001)
        order.append("rank 1 arrived")
        check_consistent(world, PLAN, FACTS)

    found = outcomes(first, second, lambda: refused(2))
    assert found == ["no usable NVIDIA GPU"] * 3 and order == ["rank 1 arrived", "rank 0 left"]
    began = time.monotonic()
    alone = job(2, waiting=replace(SOON, grace_s=0.05))[:1]
    assert outcomes(lambda: alone[0].barrier("start").abort("no GPU")) == ["fine"] and time.monotonic() - began < 10


def test_each_waiting_rank_logs_which_ranks_it_waits_for() -> None:
    messages: list[str] = []
    found = start(job(3, messages, hours_after())[:1], (PLAN, FACTS))
    assert found == ["ranks 1 and 2 did not join within 14400 s: start all 3 ranks"]
    assert messages[0] == "waiting for ranks 1 and 2"
    messages.clear()
    found = start([job(2, messages, hours_after())[1]], (PLAN, FACTS))
    assert found == ["rank 0 did not release the startup barrier within 14400 s"]
    assert messages[0] == "rank 1 is waiting for rank 0"


def test_only_rank_0_reports_if_it_is_present() -> None:
    messages, page = list[str](), store()
    second, seen = job(3, messages, page=page)[1], [False]

    def arrived() -> bool:
        """Whether rank 1 had arrived at the last poll: rank 0 reads the clock after it has read the entries."""
        before, seen[0] = seen[0], second.barrier("start").store.check(["said 1"])
        return before

    first = job(3, messages, hours_after(arrived), page)[0]
    found = outcomes(lambda: check_consistent(first, PLAN, FACTS), lambda: check_consistent(second, PLAN, FACTS))
    assert found == ["rank 2 did not join within 14400 s: start all 3 ranks"] * 2
    assert set(messages) == {"waiting for rank 2"}


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 3)])
def test_different_world_sizes_are_reported(sizes: tuple[int, ...]) -> None:
    page = store()

    def act(rank: int, size: int) -> None:
        facts = {"WORLD_SIZE": size}
        StartupBarrier(page, rank, range(size), timeouts=SOON).wait_all(facts, require_equal(facts, rank))

    found = outcomes(*(lambda r=r, s=s: act(r, s) for r, s in enumerate(sizes)))
    if sizes == (2, 2, 3):
        assert found[:2] == ["fine"] * 2, "they are complete"
        assert "rank 0 was started with WORLD_SIZE 2, rank 2 with WORLD_SIZE 3" in found[2]
    else:
        assert all(f"rank 1 was started with WORLD_SIZE {sizes[1]}, rank 0 with" in line for line in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words", [b"", b"\xff", b"[1]", b"[" * 10**5, b'{"settings": 3, "files": [1]}', b'{"refused": [1]}']
)
def test_an_invalid_entry_in_the_store_is_reported(words: bytes) -> None:
    worlds = job(2)
    worlds[0].barrier("start").store.set("said 1", words)  # pyright: ignore[reportArgumentType]
    (line,) = start(worlds[:1], (PLAN, FACTS))
    assert line.startswith("rank 1")


def test_names_and_values_are_truncated() -> None:
    assert format_ranks([1]) == "rank 1" and format_ranks([1, 2, 3]) == "ranks 1, 2 and 3"
    assert format_ranks(range(1, 4000)) == "ranks 1, 2, 3, 4, 5, 6 and 3993 more"
    errors = describe_difference("x", 0, None, 1, True), describe_difference("x", 0, "a\nb", 1, "y" * 10**6)
    assert "with x true, rank 0 with x unset" in str(errors[0]) and "rank 0 with x a b:" in str(errors[1])
    assert len(str(errors[1])) < 200
