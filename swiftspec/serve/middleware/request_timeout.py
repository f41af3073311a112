"""HTTP protocol for uvicorn that limits the time in which a request must arrive, and ignores upgrade requests."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 32 << 10  # request line and headers; a longer head is answered with 400
REQUEST_TIMEOUT_S = 30.0  # from the connection, or the first byte of a later request, to the end of the body


class RequestTimeoutProtocol(H11Protocol):
    """HTTP protocol that closes a connection whose request is incomplete after REQUEST_TIMEOUT_S, so that half-open
    connections do not accumulate."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is None and self.conn.trailing_data[0]:  # the beginning of a pipelined request
            self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """Answers a request to upgrade to WebSocket or HTTP/2 as the HTTP/1.1 request that it is. uvicorn would also
        log two warnings for each."""
        return False

    def _update_timer(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
