"""Background responses: generations that continue without their client and update the response store."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from swiftspec.serve.http.api.response_store import ResponseStore, StoredResponse
from swiftspec.serve.http.api.responses_writer import ResponsesWriter
from swiftspec.serve.http.engine_link.engine_client import EngineClient
from swiftspec.serve.http.errors import to_api_error, unavailable_error
from swiftspec.serve.http.format.generation_output import GenerationOutput

MAX_BACKGROUND_RESPONSES = 32  # that wait or run at the same time
TOO_MANY_RETRY_AFTER_S = 1.0
LOG = logging.getLogger("swiftspec.serve")


class BackgroundGeneration:
    """The generation of a stored response in a task. If the response has an event log, the events are written to it."""

    def __init__(
        self,
        engine: EngineClient,
        output: GenerationOutput,
        writer: ResponsesWriter,
        store: ResponseStore,
        stored: StoredResponse,
    ) -> None:
        self._engine, self._output, self._writer = engine, output, writer
        self._store, self._stored = store, stored
        self._accepted = False

    async def start(self) -> bytes:
        """Starts the generation, stores the response, and returns it in its first state, "queued". Raises ApiError
        (429) if too many responses run in the background, and the exception of an engine that refuses the request."""
        if self._store.num_running >= MAX_BACKGROUND_RESPONSES:
            message = f"{MAX_BACKGROUND_RESPONSES} responses run in the background: try again later"
            raise unavailable_error(message, TOO_MANY_RETRY_AFTER_S, 429)
        stored = self._stored
        self._add_events(self._writer.queued_events())
        stored.update(self._writer.response)
        queued_response = stored.response
        stored.task = asyncio.create_task(self._run())
        await asyncio.sleep(0)  # the request queue refuses a request in the first step of the task
        if stored.task.done():
            stored.task.result()
        self._accepted = True
        self._store.put(stored)
        return queued_response

    async def _run(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:  # by `cancel_generation`, or when the server shuts down
            self._add_events(self._writer.cancel_events())
        except Exception as error:
            if not self._accepted:
                raise
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                LOG.error("a background response failed", exc_info=error)
            self._add_events(self._writer.error_events(api_error))
        stored = self._stored
        stored.update(self._writer.response)
        if stored.events is not None:
            stored.events.close()
        if self._accepted:
            self._store.put(stored)

    async def _generate(self) -> None:
        async with contextlib.aclosing(self._output.deltas(self._engine)) as deltas:
            async for delta in deltas:
                if self._stored.status == "queued":
                    self._add_events(self._writer.in_progress_event())
                    self._stored.update(self._writer.response)
                self._add_events(self._writer.delta_events(delta))
        self._add_events(self._writer.end_events())

    def _add_events(self, events: bytes) -> None:
        if self._stored.events is not None:
            self._stored.events.add(events)


async def cancel_generation(stored: StoredResponse) -> None:
    """Cancels the generation of a background response, and returns when the response has its last status. Does nothing
    if the generation has ended."""
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait({stored.task})
