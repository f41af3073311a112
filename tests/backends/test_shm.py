"""Shared-memory groups and mailboxes: four processes, one of which is killed, and tests with two threads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu.shm import Mailbox, ShmCollectives, new_name
from tests.support.cases import fast_first
from tests.support.shm_rank import ROUNDS, bits, values

ROOT = Path(__file__).resolve().parents[2]
Report = list[dict[str, Any]]


def left_behind() -> list[Path]:
    return list(Path("/dev/shm").glob("swiftspec-*"))


@pytest.fixture(scope="module", params=fast_first(["yield", "spin"], 1))
def job(request: pytest.FixtureRequest) -> Iterator[tuple[list[Report], list[Path]]]:
    """The reports of four ranks, of which rank 1 was killed, and the named shared memory while they ran."""
    names, pipes = [new_name() for _ in range(4)], [os.pipe() for _ in range(4)]
    ends = [end for _, end in pipes]
    command = [sys.executable, "-m", "tests.support.shm_rank", request.param, *names, *map(str, ends)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=ends))
        for end in ends:
            os.close(end)
        ranks = [stack.enter_context(os.fdopen(near)) for near, _ in pipes]
        reports = [read_until_ready(rank) for rank in ranks]
        named = [path for path in left_behind() if f"/{path.name}" in names]
        time.sleep(0.2)  # by then the other ranks wait
        os.kill(reports[1][0]["process"], signal.SIGKILL)  # it stays a zombie until the fixture ends
        for r in (0, 2, 3):
            reports[r] += [json.loads(line) for line in ranks[r]]
        yield reports, named


def read_until_ready(rank: Iterable[str]) -> Report:
    facts: Report = []
    for line in rank:
        facts.append(json.loads(line))
        if "ready" in facts[-1]:
            return facts
    raise AssertionError(f"a rank ended early: {facts}")


def in_rank_order(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = values(0, shape, dtype).to(wide)
    for rank in range(1, size):
        total += values(rank, shape, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.slow
def test_sums_are_those_in_rank_order(job: tuple[list[Report], list[Path]]) -> None:
    for rank, facts in enumerate(job[0]):
        sums = [fact for fact in facts if "sum" in fact]
        sizes = [size for size in (2, 3, 4) if rank < size for _ in range(6)]
        assert len(sums) == len(sizes)
        for size, fact in zip(sizes, sums):
            dtype = getattr(torch, fact["sum"].removeprefix("torch."))
            assert fact["bits"] == bits(in_rank_order(size, tuple(fact["shape"]), dtype))


def test_the_order_of_summation_matters() -> None:
    """The order of summation matters for these values, so the previous test can fail."""
    a, b, c = (values(rank, (8, 384), torch.float32) for rank in range(3))
    assert not torch.equal((a + b) + c, a + (b + c))


@pytest.mark.slow
def test_gathers_and_many_rounds(job: tuple[list[Report], list[Path]]) -> None:
    for rank, facts in enumerate(job[0]):
        gathers = [fact["gather"] for fact in facts if "gather" in fact]
        assert gathers == [[[[r, 7, r]] for r in range(size)] for size in (2, 3, 4) if rank < size]
        assert not [fact for fact in facts if "wrong" in fact]
    assert [fact["ping_pong"] for facts in job[0] for fact in facts if "ping_pong" in fact] == [ROUNDS, ROUNDS]


@pytest.mark.slow
def test_a_killed_rank_is_detected(job: tuple[list[Report], list[Path]]) -> None:
    reports, _ = job
    losses = {rank: [fact for fact in reports[rank] if "lost" in fact] for rank in (0, 2, 3)}
    assert [len(losses[rank]) for rank in (0, 2, 3)] == [2, 1, 1]
    for found in losses.values():
        for loss in found:
            assert loss["lost"] == "ConnectionError"
        assert "rank 1 (process" in found[0]["message"] and "has ended" in found[0]["message"]
        assert "slot" in found[0]["message"] and "epoch" in found[0]["message"]


@pytest.mark.slow
def test_shared_memory_has_no_name_after_the_setup(job: tuple[list[Report], list[Path]]) -> None:
    assert job[1] == []


def together(*calls: Callable[[], object]) -> list[object]:
    """Runs the calls in a thread each and returns their results or exceptions."""
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def groups(size: int, **options: Any) -> list[ShmCollectives]:
    name = new_name()
    made = together(*(lambda r=r: ShmCollectives(name, r, size, spin=False, **options) for r in range(size)))
    assert all(isinstance(group, ShmCollectives) for group in made), made
    return [group for group in made if isinstance(group, ShmCollectives)]


def mailboxes(**options: Any) -> tuple[Mailbox, Mailbox]:
    name = new_name()
    made = together(*(lambda side=side: Mailbox(name, side, spin=False, **options) for side in (0, 1)))
    assert isinstance(made[0], Mailbox) and isinstance(made[1], Mailbox), made
    return made[0], made[1]


def test_a_group_of_one() -> None:
    group = groups(1)[0]
    x = values(0, (3, 5), torch.bfloat16)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x[None])


def test_sums_in_place_and_out_of_place() -> None:
    group = groups(1)[0]
    x = torch.arange(24.0).view(4, 6)
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_reduce(x.t()), x.t())
    assert torch.equal(group.all_gather(x.t()), x.t()[None])
    assert group.all_gather(x.t()[:0]).shape == (1, 0, 4)
    with pytest.raises(ValueError, match="float32, float64 or bfloat16"):
        group.all_reduce(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="on cpu"):
        group.all_reduce(torch.ones(2, device="meta"))


def test_a_rank_that_misses_a_sum_is_named() -> None:
    ours, other = groups(2, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"rank 0 waited too long for rank 1 \(slot 0, epoch 0\): 0.05 s"):
        ours.all_reduce(torch.ones(2))
    for group, call in ((other, "all_reduce"), (ours, "all_gather")):  # later calls repeat the reason
        with pytest.raises(ConnectionError, match="rank 0 waited too long for rank 1"):
            [getattr(group, call)(torch.ones(2)) for _ in range(2)]


def test_a_rank_that_closes_its_group() -> None:
    first, second, third = groups(3)
    together(*(lambda g=g: g.all_reduce(torch.ones(2)) for g in (first, second, third)))
    third.close()
    for error in together(*(lambda g=g: g.all_gather(torch.ones(2)) for g in (first, second))):
        assert isinstance(error, ConnectionError)
        assert "rank 2 has left the group" in str(error) and "(slot 1, epoch 1)" in str(error)


def test_messages_sent_before_closing_arrive() -> None:
    ours, theirs = mailboxes()
    theirs.send(range(5))
    theirs.close()
    assert ours.recv(1) == [0, 1, 2, 3, 4]
    with pytest.raises(ConnectionError, match="closed"):
        ours.recv(10)
    with pytest.raises(ConnectionError, match="closed"):
        ours.send([0])


def test_an_expired_wait_can_be_repeated() -> None:
    ours, theirs = mailboxes()
    for timeout in (0, 0.02):
        with pytest.raises(TimeoutError, match="no message for"):
            ours.recv(timeout)
    theirs.send([])
    theirs.send((7, -7, 2**31 - 1))
    assert ours.recv(1) == []
    assert ours.recv(0) == [7, -7, 2**31 - 1]


def test_a_full_mailbox() -> None:
    """Eight lines hold two messages of six words; a third one waits, and a longer one is streamed."""
    ours, theirs = mailboxes(words=16, timeout_s=0.05)
    message = list(range(6))
    ours.send(message)
    ours.send(message)
    with pytest.raises(TimeoutError, match=r"stayed full for 0\.05 s"):
        ours.send(message)
    assert theirs.recv(1) == theirs.recv(1) == message
    ours.timeout_s = theirs.timeout_s = 10
    long = list(range(1001))
    _, got = together(lambda: ours.send(long), lambda: theirs.recv(10))
    assert got == long
    ours.timeout_s = 0.05
    with pytest.raises(TimeoutError):
        ours.send(long)  # not received, so it is truncated and breaks the mailbox
    with pytest.raises(ConnectionError, match="cut short"):
        ours.send(message)
    with pytest.raises(ConnectionError, match="closed"):
        theirs.recv(10)
    with pytest.raises(TypeError, match="incompatible"):
        ours.send([2**31])


def test_an_incomplete_group_times_out() -> None:
    with pytest.raises(TimeoutError, match="only 1 of 2 ranks"):
        ShmCollectives(new_name(), 0, 2, spin=False, attach_timeout_s=0.05)
    with pytest.raises(TimeoutError, match="rank 0 has not made"):
        ShmCollectives(new_name(), 1, 2, spin=False, attach_timeout_s=0.05)
    name = new_name()
    found = together(
        lambda: ShmCollectives(name, 0, 3, spin=False, attach_timeout_s=0.3),
        lambda: ShmCollectives(name, 1, 3, spin=False, attach_timeout_s=0.3, capacity=64),
    )
    assert isinstance(found[0], TimeoutError) and isinstance(found[1], ValueError)
    assert "other sizes" in str(found[1])
    for rank, size in ((-1, 2), (2, 2), (0, 0), (0, 17)):
        with pytest.raises(ValueError, match="ranks"):
            ShmCollectives(name, rank, size, spin=False)
    with pytest.raises(OSError, match="shared memory"):
        ShmCollectives("/a/b", 0, 2, spin=False)
    with pytest.raises(ValueError, match="side"):
        Mailbox(name, 2, spin=False)
    assert not [path for path in left_behind() if path.name == name[1:]]


@pytest.mark.slow
def test_a_rank_killed_before_the_group_is_complete() -> None:
    name = new_name()
    path = Path("/dev/shm") / name[1:]
    code = f"from swiftspec import _C; _C.ShmGroup({name!r}, 0, 3, 4096, 60.0, False)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as first:
        while not path.exists():
            assert first.poll() is None
            time.sleep(0.01)
        assert path.stat().st_mode & 0o777 == 0o600
        threading.Timer(0.2, first.kill).start()
        with pytest.raises(ConnectionError, match="rank 0 ended while the group was being formed"):
            ShmCollectives(name, 1, 3, spin=False, capacity=4096)
    assert not path.exists()


def test_ctrl_c_interrupts_a_wait() -> None:
    ours, _theirs = mailboxes()
    timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ours.recv(3600)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert isinstance(ours._mailbox, _C.Mailbox)
