"""Shared memory against sockets between two processes: the all-reduce of a tensor-parallel layer (12 KB: 8 rows of 384
float32) by LL and by gloo, and the round trip of a message (100 machine words) by mailbox and by TCP over localhost.

    python -m bench.ll [--runs 5] [--calls 2000] [--no-pin]

Prints a table and one line of JSON with the median and the 98th percentile of a call in microseconds, measured by the
caller in Python. The transports alternate within a run. The run with the best median counts, with its percentile, since
other work on the machine disturbs whichever transport is running. Each process is pinned to one core, sockets included;
with --no-pin the system schedules them, on a busy machine often both on one core.

    torchrun --standalone --nproc-per-node 2 -m bench.ll --device cuda

compares the gather of the same tensor on two GPUs: by LL through peer memory, and by NCCL. The times are those of calls
in a CUDA graph, without the host. Sums of products in their kernels are compared by bench.gpu.all_reduce. Not run on a
GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.device import add_device_flag, check_device
from bench.common.groups import leave
from bench.gpu.timing import fixed_graph_timer
from swiftspec.backends.cpu.shm import Mailbox, ShmCollectives, new_name
from swiftspec.distributed.collectives.join import join_group
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.distributed.launch.world import join_world

ROWS, WIDTH, WORDS = 8, 384, 100
WAYS = ["all_reduce LL", "all_reduce gloo", "round trip mailbox", "round trip TCP"]


def connect(side: int, folder: Path) -> socket.socket:
    """Opens a TCP connection between the two processes. The file `folder`/port passes the port number to side 1."""
    port = folder / "port"
    if side == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            (folder / "port.new").write_text(str(server.getsockname()[1]))
            (folder / "port.new").rename(port)
            peer, _ = server.accept()
    else:
        while not port.exists():
            time.sleep(0.01)
        peer = socket.create_connection(("127.0.0.1", int(port.read_text())))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += peer.recv(size - len(data))
    return data


def ways(rank: int, folder: Path, names: list[str], spin: bool) -> dict[str, Callable[[], object]]:
    """Returns the calls of one process by name. Both processes make the same call at the same time."""
    group = ShmCollectives(names[0], rank, 2, spin=spin)
    mailbox = Mailbox(names[1], rank, spin=spin)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    peer = connect(rank, folder)
    x = torch.zeros(ROWS, WIDTH)
    message = [0] * WORDS
    data = bytes(4 * WORDS)

    def by_mailbox() -> None:
        if rank == 0:
            mailbox.send(message)
        mailbox.recv(30)
        if rank == 1:
            mailbox.send(message)

    def by_tcp() -> None:
        if rank == 0:
            peer.sendall(data)
        receive(peer, len(data))
        if rank == 1:
            peer.sendall(data)

    calls = [lambda: group.all_reduce(x), lambda: dist.all_reduce(x), by_mailbox, by_tcp]
    return dict(zip(WAYS, calls, strict=True))


def measure(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Returns the median and the 98th percentile of a call in microseconds, after a warm-up of a tenth of the calls."""
    times = []
    for i in range(calls + calls // 10):
        began = time.perf_counter()
        call()
        if i >= calls // 10:
            times.append(1e6 * (time.perf_counter() - began))
    times.sort()
    return times[len(times) // 2], times[len(times) * 98 // 100]


def run_rank(
    rank: int, folder: Path, names: list[str], runs: int, calls: int, pin: bool
) -> list[dict[str, tuple[float, float]]]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if pin:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    mine = ways(rank, folder, names, spin=len(cores) >= 2)
    results = [{name: measure(call, calls) for name, call in mine.items()} for _ in range(runs)]
    dist.destroy_process_group()
    return results


def show(results: list[dict[str, tuple[float, float]]], pinned: bool) -> None:
    best = {name: min(run[name] for run in results) for name in WAYS}
    ratios = {
        "all_reduce": best["all_reduce gloo"][0] / best["all_reduce LL"][0],
        "round_trip": best["round trip TCP"][0] / best["round trip mailbox"][0],
    }
    print(f"{'':20} {'median us':>10} {'98 % us':>10}")
    for name, (median, late) in best.items():
        print(f"{name:20} {median:10.1f} {late:10.1f}")
    print(f"LL is {ratios['all_reduce']:.1f}x as fast as gloo, the mailbox {ratios['round_trip']:.1f}x as fast as TCP")
    print(json.dumps({"best": best, "ratios": ratios, "runs": results, "pinned": pinned, "cores": os.cpu_count()}))


def measure_gathers(parser: argparse.ArgumentParser) -> None:
    """Measures the gathers between two GPUs, and prints microseconds by name on rank 0. Exits with a message if there
    are not two ranks, or if their GPUs do not exchange data by peer memory."""
    world = join_world()
    if world is None or world.size != 2:
        parser.error("requires two ranks; start it with torchrun --standalone --nproc-per-node 2 -m bench.ll")
    check_device(parser, "cuda", world.local_size)
    device = torch.device("cuda", world.local_rank)
    group = join_group(world, "ll", world.rank, 2, device=device, share_device=False, width=WIDTH)
    if not isinstance(group, PeerMemoryGroup):
        parser.error("these GPUs do not exchange data by peer memory, which LL needs")
    x = torch.zeros(ROWS, WIDTH, device=device)
    library = TorchDistGroup("ll", world.rank, 2, nccl=True)
    calls: dict[str, Callable[[], object]] = {
        "all_gather LL": lambda: group.all_gather(x), "all_gather NCCL": lambda: library.all_gather(x),
    }  # fmt: skip
    found = {name: fixed_graph_timer([call]) for name, call in calls.items()}
    if world.rank == 0:
        print("\n".join(f"{name:20} {us:10.2f} us" for name, us in found.items()))
        print(json.dumps(found))
    leave(group, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--no-pin", dest="pin", action="store_false")
    parser.add_argument("--join", nargs=3, metavar=("FOLDER", "GROUP", "MAILBOX"), help=argparse.SUPPRESS)
    add_device_flag(parser)
    args = parser.parse_args()
    check_device(parser, args.device)
    if args.device == "cuda":
        measure_gathers(parser)
        return
    if args.join:
        run_rank(1, Path(args.join[0]), args.join[1:], args.runs, args.calls, args.pin)
        return
    with tempfile.TemporaryDirectory() as folder:
        names = [new_name(), new_name()]
        shape = ["--runs", str(args.runs), "--calls", str(args.calls), *([] if args.pin else ["--no-pin"])]
        other = subprocess.Popen([sys.executable, "-m", "bench.ll", *shape, "--join", folder, *names])
        try:
            results = run_rank(0, Path(folder), names, args.runs, args.calls, args.pin)
            other.wait(60)
        finally:
            other.kill()
    show(results, args.pin)


if __name__ == "__main__":
    main()
