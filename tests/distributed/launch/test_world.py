"""Worlds from explicit values, as a launcher without torchrun's environment variables builds them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import SamplingParams
from swiftspec.distributed.launch import world as world_module
from swiftspec.distributed.launch.startup_barrier import Timeouts
from swiftspec.distributed.launch.world import World, available_cores, cores_near_gpu, parse_cpu_list, require_equal
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from tests.support.tiny_checkpoints import make_pair

TIMEOUTS = Timeouts(timeout_s=20.0, first_log_s=5.0, log_interval_s=5.0, grace_s=0.2)
SAMPLING = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
RANK = """
import json, sys, torch
from swiftspec import EngineConfig, SamplingParams
from swiftspec.llm_engine import LLMEngine
from swiftspec.distributed.launch.world import World
from swiftspec.llm_engine import serve_rank

rank, address, target, draft, sampling = sys.argv[1:]
world = World.join(int(rank), 2, address)
config = EngineConfig("async", target_tp=1, draft_tp=1, draft_steps=2)
if world.rank:
    serve_rank(world, target, draft, config, dtype=torch.float64)
else:
    llm = LLMEngine(target, draft, config, world=world, dtype=torch.float64)
    print(json.dumps(llm.generate([5, 6, 7], SamplingParams(**json.loads(sampling))).token_ids))
    llm.close()
"""


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_ranks_join_from_explicit_values(address: str) -> None:
    worlds, core = dict[int, World](), min(available_cores())

    def join(rank: int) -> None:
        world = World.join(rank, 2, address, cores={core}, timeouts=TIMEOUTS)
        world.barrier("further").wait_all({"x": 1}, require_equal({"x": 1}, rank))
        worlds[rank] = world

    threads = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(worlds[n].rank, worlds[n].size, worlds[n].local_rank, worlds[n].local_size) for n in range(2)] == [
        (0, 2, 0, 2), (1, 2, 1, 2)
    ]  # fmt: skip
    worlds[0].store.set("key", "value")
    assert worlds[1].store.get("key") == b"value" and worlds[1].cores == {core}
    assert (worlds[0].host, worlds[0].one_machine, worlds[0].rendezvous) == ("127.0.0.1", True, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 1}, r"size must lie in 2\.\.4096, not 1; a single rank needs no World"),
        ({"rank": 4}, r"rank must lie in 0\.\.3, not 4"),
        ({"local_size": 5}, r"local_size must lie in 1\.\.4, not 5"),
        ({"rank": 1, "local_rank": 0, "local_size": 4}, "local_rank 0 of 4 does not match rank 1 of 4"),
        ({"rank": 0, "local_rank": 1, "local_size": 2}, "local_rank 1 of 2 does not match rank 0 of 4: number the"),
        ({"cores": {99999}}, r"cores \{99999\} are not available to this process"),
        ({"store_address": "localhost"}, "store_address must be HOST:PORT, not 'localhost'"),
        ({"store_address": "localhost:70000"}, "store_address must be HOST:PORT"),
    ],
)
def test_invalid_values_are_reported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        World.join(**{"rank": 0, "size": 4, "store_address": "localhost:1", **values})


@pytest.mark.slow
def test_two_processes_decode_without_environment_variables(tmp_path: Path, address: str) -> None:
    target, draft = make_pair(tmp_path)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), address, str(target), str(draft), json.dumps(SAMPLING)],
            env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=110)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    alone = LLMEngine(target, draft, dtype=torch.float64).generate([5, 6, 7], SamplingParams(**SAMPLING))
    assert json.loads(outputs[0]) == alone.token_ids


def test_cores_of_a_gpus_numa_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the job on the GPU's node; all of the job's if the system does not list them or none is there."""
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8} and parse_cpu_list("\n") == set()
    monkeypatch.setattr(world_module, "PCI_DEVICES", tmp_path)
    near = {"0000:3b:00.0": "0-3,8-11", "0000:af:00.0": "64-127", "0001:00:00.0": "what"}
    for address, text in near.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(text + "\n")
    cores = range(2, 10)
    assert cores_near_gpu("0000:3b:00.0", cores) == {2, 3, 8, 9}
    for address in ("0000:af:00.0", "0001:00:00.0", "0000:00:00.0", None):
        assert cores_near_gpu(address, cores) == {*cores}
