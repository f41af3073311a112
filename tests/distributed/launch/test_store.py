"""The store of the rendezvous: one-line messages for a waiting rank, a port in use, and a rank number that two
processes have."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftspec.distributed.launch import store as module
from swiftspec.distributed.launch import world as worlds
from swiftspec.distributed.launch.launched_rank import LaunchedRank
from swiftspec.distributed.launch.startup_barrier import Timeouts
from swiftspec.distributed.launch.store import open_store
from swiftspec.distributed.launch.world import World, join_world
from swiftspec.errors import UserError

NET = Path("/proc/net")
SOON = Timeouts(timeout_s=20.0, first_log_s=0.05, log_interval_s=0.05, grace_s=0.2)
BRIEF = Timeouts(timeout_s=0.3, first_log_s=0.05, log_interval_s=0.05, grace_s=0.1)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which a process listens that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def rank(number: int, port: int, size: int = 2) -> LaunchedRank:
    return LaunchedRank(number, size, number, size, "127.0.0.1", port)


def test_a_rank_logs_that_it_waits_for_the_store(port: int) -> None:
    messages, waits, stores = [], threading.Event(), []

    def log(text: str) -> None:
        messages.append(text)
        waits.set()

    def keep() -> None:
        assert waits.wait(20)
        stores.append(open_store(rank(0, port), log, SOON))

    keeper = threading.Thread(target=keep)
    keeper.start()
    open_store(rank(1, port), log, SOON).set("a", "b")
    keeper.join()
    assert stores[0].get("a") == b"b" and len(messages) >= 1
    assert messages[0].startswith(f"rank 1 is waiting for rank 0 at 127.0.0.1:{port} (Connection refused)")


def test_no_process_hosts_the_store(port: int) -> None:
    with pytest.raises(UserError, match=rf"^rank 1 cannot reach rank 0 at 127.0.0.1:{port} .* check the address"):
        open_store(rank(1, port), lambda text: None, BRIEF)


def test_a_port_in_use_names_its_variable(listener: int) -> None:
    with pytest.raises(UserError, match=f"^port {listener} is in use on this machine: choose another one .MASTER_PORT"):
        open_store(rank(0, listener), lambda text: None, SOON)


@pytest.mark.skipif(not NET.exists(), reason="only Linux tells where it listens")
def test_a_store_of_one_machine_listens_only_on_loopback(port: int) -> None:
    """torch by itself listens on every address of the machine."""
    store = open_store(rank(0, port), lambda text: None, SOON)
    store.set("a", "b")
    assert b"".join(addresses_at(port)) == bytes([127, 0, 0, 1])[::-1]


def addresses_at(port: int) -> list[bytes]:
    """The addresses on which this machine listens on a port, according to the kernel."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in (NET / name).read_text().splitlines()[1:]]
    found = [words[1].split(":") for words in lines if words[3] == "0A"]  # listening
    return [bytes.fromhex(address) for address, number in found if int(number, 16) == port]


def test_another_service_on_the_port_is_reported(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.5)
    with pytest.raises(UserError, match=f"^no store at 127.0.0.1:{listener} .*MASTER_PORT"):
        open_store(rank(1, listener), lambda text: None, SOON)


def test_joining(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks join; a third process that also claims to be rank 1 is refused."""
    local = threading.local()
    monkeypatch.setattr(worlds, "launched", lambda: rank(local.rank, port))
    monkeypatch.setattr(worlds, "pin_to_cores", lambda cores: None)
    found: dict[str, World | UserError | None] = {}

    def join(name: str, number: int) -> None:
        local.rank = number
        try:
            found[name] = join_world(timeouts=SOON)
        except UserError as error:
            found[name] = error

    first, second = (threading.Thread(target=join, args=(str(number), number)) for number in (0, 1))
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join(30)
    join("again", 1)
    assert all(isinstance(found[name], World) for name in "01")
    assert str(found["again"]).startswith(f"another process is rank 1 of the job at 127.0.0.1:{port}: ")
