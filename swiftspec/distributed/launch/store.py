"""The store where the ranks of a job meet: rank 0 keeps it, or the launcher does. Whoever waits for it says so."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.distributed.launch.launcher import Launched
from swiftspec.distributed.launch.startup_barrier import LogFn, PollTimer, Timeouts, first_line
from swiftspec.errors import UserError

CONNECT_ATTEMPT_S = 5.0  # seconds for one attempt to connect
HANDSHAKE_TIMEOUT_S = 20.0  # seconds in which a store has answered


def open_store(here: Launched, log: LogFn, timeouts: Timeouts) -> Store:
    """This rank's end of the store. Raises UserError where there is none, and says why."""
    keeps = here.rank == 0 and not here.agent
    if not keeps:
        _wait_for_server(here, log, timeouts)
    store = _handshake(here, keeps)
    store.set_timeout(timedelta(seconds=timeouts.timeout_s))
    return PrefixStore(f"attempt {here.attempt}", store)


def _wait_for_server(here: Launched, say: LogFn, waiting: Timeouts) -> None:
    """Until somebody listens where the store should be. torch would wait without a word."""
    clock, keeper = PollTimer(waiting), "the launcher's store" if here.agent else "rank 0"
    while True:
        try:
            socket.create_connection((here.host, here.port), min(CONNECT_ATTEMPT_S, waiting.timeout_s)).close()
            return
        except OSError as error:
            why = f"{keeper} at {here.host}:{here.port} ({error.strerror or first_line(error)})"
        if not clock.sleep(lambda: say(f"rank {here.rank} is waiting for {why}")):  # noqa: B023
            raise UserError(f"rank {here.rank} does not reach {why}: look at MASTER_ADDR and MASTER_PORT")


def _handshake(here: Launched, keeps: bool) -> TCPStore:
    """Opens the store. In a thread, as torch waits for ever where something else than a store listens."""
    found: list[TCPStore | RuntimeError | ValueError] = []
    listening = _loopback(here) if keeps else None

    def connect() -> None:
        try:
            made = TCPStore(
                here.host, here.port, here.size, keeps, timedelta(seconds=HANDSHAKE_TIMEOUT_S), wait_for_workers=False,
                multi_tenant=True, master_listen_fd=listening,
            )  # fmt: skip
            found.append(made)
        except (RuntimeError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HANDSHAKE_TIMEOUT_S)
    result = found[0] if found else RuntimeError("nothing answers as a store does")
    if isinstance(result, TCPStore):
        return result
    reason = first_line(result)
    if "EADDRINUSE" in reason:
        raise _in_use(here)
    raise UserError(f"no store at {here.host}:{here.port} ({reason[:200]}): look at MASTER_ADDR and MASTER_PORT")


def _loopback(here: Launched) -> int | None:
    """The file of a socket that listens for the store where its address is this machine's alone: torch would listen for
    everybody. It is torch's then. None where ranks of other machines come, or nobody knows the address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM)[0]
        if not ip_address(address[0]).is_loopback:
            return None
        listening = socket.socket(family, kind)
    except (OSError, ValueError):
        return None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: the last job's may linger
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(here) from None
        return None
    return listening.detach()


def _in_use(here: Launched) -> UserError:
    return UserError(f"port {here.port} is in use on this machine: choose another with MASTER_PORT")
