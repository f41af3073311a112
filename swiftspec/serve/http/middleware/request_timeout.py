"""uvicorn's HTTP protocol, with a bound on how long a request may take to come in, and on how large its head may be."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 32 << 10  # a longer head of a request is a 400
ARRIVAL = 30.0  # seconds from the first byte (or the connection) to the last one of the body


class PatientProtocol(H11Protocol):
    """Closes the connection of a client that sends no whole request in time: half-open ones would pile up."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_rest()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._late is None and self.conn.trailing_data[0]:  # the next request has begun to come in
            self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _await_rest(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(ARRIVAL, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
