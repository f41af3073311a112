"""Key-value store of a job, served by rank 0 or by the launcher. A rank logs that it is waiting for the store."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.distributed.launch.launched_rank import LaunchedRank
from swiftspec.distributed.launch.startup_barrier import LogFn, PollTimer, Timeouts, first_line
from swiftspec.errors import UserError

CONNECT_ATTEMPT_S = 5.0  # seconds per connection attempt
HANDSHAKE_TIMEOUT_S = 20.0  # seconds within which the store must answer
CHECK_ADDRESS = "check the address of the store (MASTER_ADDR and MASTER_PORT)"


def open_store(here: LaunchedRank, log: LogFn, timeouts: Timeouts) -> Store:
    """Connects to the store and returns it; rank 0 also serves the store if the launcher does not. Raises UserError if
    that fails."""
    keeps = here.rank == 0 and not here.agent
    if not keeps:
        _wait_for_server(here, log, timeouts)
    store = _handshake(here, keeps)
    store.set_timeout(timedelta(seconds=timeouts.timeout_s))
    return PrefixStore(f"attempt {here.attempt}", store)


def _wait_for_server(here: LaunchedRank, say: LogFn, waiting: Timeouts) -> None:
    """Blocks until the store's port accepts connections, since torch would block without a log line. Raises UserError
    after the timeout."""
    clock, keeper = PollTimer(waiting), "the launcher's store" if here.agent else "rank 0"
    while True:
        try:
            socket.create_connection((here.host, here.port), min(CONNECT_ATTEMPT_S, waiting.timeout_s)).close()
            return
        except OSError as error:
            why = f"{keeper} at {here.host}:{here.port} ({error.strerror or first_line(error)})"
        # `sleep` calls the function before it returns, so that it does not outlive `why`
        if not clock.sleep(lambda: say(f"rank {here.rank} is waiting for {why}")):  # noqa: B023
            raise UserError(f"rank {here.rank} cannot reach {why}: {CHECK_ADDRESS}")


def _handshake(here: LaunchedRank, serves_store: bool) -> TCPStore:
    """Opens the store, in a thread, because torch blocks forever if another program listens on the port. Raises
    UserError if that fails or takes longer than HANDSHAKE_TIMEOUT_S. `serves_store`: whether this rank does."""
    found: list[TCPStore | RuntimeError | ValueError] = []
    listening = _loopback(here) if serves_store else None

    def connect() -> None:
        try:
            made = TCPStore(
                here.host,
                here.port,
                here.size,
                serves_store,
                timedelta(seconds=HANDSHAKE_TIMEOUT_S),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listening,
            )
            found.append(made)
        except (RuntimeError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HANDSHAKE_TIMEOUT_S)
    result = found[0] if found else RuntimeError("no response from a store")
    if isinstance(result, TCPStore):
        return result
    reason = first_line(result)
    if "EADDRINUSE" in reason:
        raise _in_use(here)
    raise UserError(f"no store at {here.host}:{here.port} ({reason[:200]}): {CHECK_ADDRESS}")


def _loopback(here: LaunchedRank) -> int | None:
    """Returns the file descriptor of a socket that listens on the store's address if that is a loopback address, since
    torch itself would listen on all interfaces. torch takes ownership of the descriptor.

    Returns None if the address is not a loopback address or cannot be resolved, or if the socket cannot listen. Raises
    UserError if the port is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM)[0]
        if not ip_address(address[0]).is_loopback:
            return None
        listening = socket.socket(family, kind)
    except (OSError, ValueError):
        return None
    try:
        # As torch does, since a socket of a previous job may be in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(here) from None
        return None
    return listening.detach()


def _in_use(here: LaunchedRank) -> UserError:
    return UserError(f"port {here.port} is in use on this machine: choose another one (MASTER_PORT)")
