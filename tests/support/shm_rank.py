"""The ranks of tests/backends/test_shm.py, one process each, forked from one that has imported torch.

`python -m tests.support.shm_rank spin|yield GROUP GROUP GROUP MAILBOX FD FD FD FD`, with one descriptor per rank for
its output. Lives until its standard input ends, so that a killed rank stays a zombie.

A rank works through the groups and the mailbox of these names, writes one line of JSON for each step, and then waits in
a sum that never completes: rank 1 is killed there.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from swiftspec.backends.cpu.shm import Mailbox, ShmCollectives

ROUNDS = 200


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The summands of a rank: magnitudes so different that the order of summation matters."""
    generator = torch.Generator().manual_seed(rank + 1)
    scale = 2.0 ** torch.randint(-12, 12, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # the standard output of a rank goes to the test


def bits(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def collectives(group: ShmCollectives) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((3, 5), (8, 384)):
            report(sum=str(dtype), shape=shape, bits=bits(group.all_reduce(values(group.rank, shape, dtype))))
    report(gather=group.all_gather(torch.tensor([[group.rank, 7, group.rank]], dtype=torch.int16)).tolist())
    for i in range(ROUNDS):
        total = group.all_reduce(torch.full((i % 40 + 1,), float(group.rank + i)))
        if not bool((total == sum(r + i for r in range(group.size))).all()):
            report(wrong=i)


def ping_pong(mailbox: Mailbox, side: int) -> None:
    for i in range(ROUNDS):
        if side == 0:
            mailbox.send(range(i, 2 * i))
        message = mailbox.recv(30)
        if message != list(range(i, 2 * i)):
            report(wrong=i)
        if side == 1:
            mailbox.send(message)
    report(ping_pong=ROUNDS)


def until_lost(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError as error:
        report(lost=type(error).__name__, message=str(error))


def work(rank: int, spin: bool, names: list[str]) -> None:
    report(process=os.getpid())
    groups = [ShmCollectives(name, rank, n, spin=spin, capacity=4096) for n, name in zip((2, 3, 4), names) if rank < n]
    mailbox = Mailbox(names[3], rank, spin=spin, words=64) if rank < 2 else None
    for group in groups:
        collectives(group)
    if mailbox is not None:
        ping_pong(mailbox, rank)
    report(ready=True)
    if rank == 1:
        time.sleep(60)
    until_lost(lambda: groups[-1].all_reduce(torch.zeros(4)))
    if mailbox is not None:
        until_lost(lambda: mailbox.recv(30))


def main() -> None:
    spin, names, ends = sys.argv[1] == "spin", sys.argv[2:6], [int(word) for word in sys.argv[6:]]
    torch.set_num_threads(1)
    ranks = []
    for rank, end in enumerate(ends):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.dup2(end, sys.stdout.fileno())
            os.closerange(min(ends), max(ends) + 1)
            try:
                work(rank, spin, names)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    os.closerange(min(ends), max(ends) + 1)
    sys.stdin.read()
    for process in ranks:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
