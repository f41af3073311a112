"""Writer for OpenAI's Responses API: a list of output items, and events for each change of an item."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from swiftspec.serve.app_context import new_id
from swiftspec.serve.errors import ApiError, error_body
from swiftspec.serve.format.generation_output import GenerationOutput, OutputDelta
from swiftspec.serve.format.logprobs import LogprobFormatter
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.serve.sse import sse_event

REASONING, MESSAGE = "reasoning", "message"
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of a failed response, by HTTP status
SERVER_ERROR = "server_error"
NO_NAMESPACES: Mapping[str, tuple[str, str]] = MappingProxyType({})


def ignore_end() -> None:
    """Default `on_end` of `ResponsesWriter`: does nothing."""


class ResponsesWriter:
    """Formatter of a generation as a response, whose output items are reasoning, a message and tool calls.

    `echoed_fields`: fields of the request that the response repeats.
    `top`: number of top log-probabilities per token of the message; None: no log-probabilities.
    `namespaces`: namespace and name of the tools that have one, by the name that the model knows.
    `on_end`: called when `response` has reached its last state.
    """

    has_logprobs = False  # at most 20 per token, which take no noticeable time

    def __init__(
        self,
        output: GenerationOutput,
        echoed_fields: Mapping[str, Any],
        logprob_formatter: LogprobFormatter,
        top: int | None,
        namespaces: Mapping[str, tuple[str, str]] = NO_NAMESPACES,
    ) -> None:
        self._output, self._logprob_formatter, self._top = output, logprob_formatter, top
        self._namespaces = namespaces
        self.on_end: Callable[[], None] = ignore_end
        self.response_id = new_id("resp_")
        self._common_fields = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            **echoed_fields,
        }
        self._items: list[dict[str, Any]] = []
        self._open_text = ""  # text of the open item
        self._first_token = self._end_token = 0  # tokens of the open item so far
        self._open_kind: str | None = None
        self._sequence_number = 0
        self._set_state("in_progress")

    @property
    def response(self) -> dict[str, Any]:
        """The response in its current state. Its output is empty until it ends."""
        return self._response

    @property
    def status(self) -> str:
        """The field `status` of the response."""
        return str(self._response["status"])

    def start_events(self) -> bytes:
        """Returns the start events, which contain an empty response."""
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns a delta for each piece of text in the round, and an item for each tool call."""
        out = b""
        for piece in delta.pieces:
            if piece.tool_call is not None:
                out += self._close_item(self._end_token) + self._call_events(piece.tool_call)
                continue
            kind = REASONING if piece.kind == "reasoning" else MESSAGE
            out += self._open_item(kind, piece.first_token)
            first_token, self._end_token = self._end_token, piece.end_token
            if kind == REASONING:
                out += self._delta_event("response.reasoning_text.delta", piece.text)
            else:
                logprobs = self._logprobs(first_token, piece.end_token)
                out += self._delta_event("response.output_text.delta", piece.text, logprobs=logprobs)
        return out

    def end_events(self) -> bytes:
        """Returns the last events of the open item, and the complete response."""
        out = self._open_if_empty() + self._close_last_item(cut=self._output.finish_reason == "length")
        response = self.full_response()
        return out + self._event(f"response.{self.status}", response=response)

    def error_events(self, error: ApiError) -> bytes:
        """Returns the last events of a response whose generation failed: an error, in the schema of OpenAI's other
        endpoints too, and the failed response."""
        out = self._close_last_item(cut=True)
        code = ERROR_CODES.get(error.status, SERVER_ERROR)
        self._set_state("failed", error={"code": code, "message": error.message}, output=list(self._items))
        self.on_end()
        fields = {"code": error.code or error.kind, "message": error.message, "param": error.param}
        out += self._event("error", **fields, **error_body(error))
        return out + self._event("response.failed", response=self._response)

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        output = self._output
        cut = output.finish_reason == "length"
        self._open_if_empty()
        self._close_last_item(cut)
        usage = {
            "input_tokens": len(output.prompt),
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(output.tokens),
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": len(output.prompt) + len(output.tokens),
        }
        self._set_state(
            "incomplete" if cut else "completed",
            output=list(self._items),
            usage=usage,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            **output.stats(),
        )
        self.on_end()
        return self._response

    def _set_state(self, status: str, **fields: Any) -> None:
        state = {"status": status, "error": None, "incomplete_details": None, "usage": None, "output": []}
        self._response = {**self._common_fields, **state, **fields}

    def _open_if_empty(self) -> bytes:
        """Opens an empty message if there is no item, as after a forced tool call that was cut: a complete response has
        at least one item."""
        return b"" if self._items else self._open_item(MESSAGE, 0)

    def _open_item(self, kind: str, first_token: int) -> bytes:
        if self._open_kind == kind:
            return b""
        out = self._close_item(self._end_token)
        self._open_kind, self._open_text = kind, ""
        self._first_token = self._end_token = first_token
        item: dict[str, Any] = {"id": new_id("rs_" if kind == REASONING else "msg_"), "type": kind, "content": []}
        item |= {"status": "in_progress"} | ({"summary": []} if kind == REASONING else {"role": "assistant"})
        self._items.append(item)
        out += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return out + self._event(
            "response.content_part.added", **self._position(), part=self._content(self._first_token)
        )

    def _delta_event(self, name: str, text: str, **more: Any) -> bytes:
        self._open_text += text
        return self._event(name, **self._position(), delta=text, **more)

    def _close_last_item(self, cut: bool) -> bytes:
        """Closes the open item at the end of the output. `cut`: whether the output ended before the item did."""
        return self._close_item(len(self._output.tokens), "incomplete" if cut else "completed")

    def _close_item(self, end_token: int, status: str = "completed") -> bytes:
        """Closes the open item, if any, and returns its last events. Its tokens end before the index `end_token`."""
        if self._open_kind is None:
            return b""
        content = self._content(end_token)
        name = "response.reasoning_text.done" if self._open_kind == REASONING else "response.output_text.done"
        more = {} if self._open_kind == REASONING else {"logprobs": content["logprobs"]}
        out = self._event(name, **self._position(), text=self._open_text, **more)
        out += self._event("response.content_part.done", **self._position(), part=content)
        item = self._items[-1] = {**self._items[-1], "status": status, "content": [content]}
        self._open_kind = None
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call_events(self, call: ParsedToolCall) -> bytes:
        index, name = len(self._items), new_id("fc_")
        namespace, tool = self._namespaces.get(call.name, (None, call.name))
        item = {"id": name, "type": "function_call", "call_id": call.id, "name": tool, "arguments": ""}
        item |= {} if namespace is None else {"namespace": namespace}
        done = {**item, "arguments": call.arguments_json, "status": "completed"}
        self._items.append(done)
        arguments = {"item_id": name, "output_index": index}
        done_arguments = {**arguments, "name": tool, "arguments": call.arguments_json}
        return (
            self._event("response.output_item.added", output_index=index, item={**item, "status": "in_progress"})
            + self._event("response.function_call_arguments.delta", **arguments, delta=call.arguments_json)
            + self._event("response.function_call_arguments.done", **done_arguments)
            + self._event("response.output_item.done", output_index=index, item=done)
        )

    def _content(self, end_token: int) -> dict[str, Any]:
        if self._open_kind == REASONING:
            return {"type": "reasoning_text", "text": self._open_text}
        text = {"type": "output_text", "text": self._open_text, "annotations": []}
        return {**text, "logprobs": self._logprobs(self._first_token, end_token)}

    def _logprobs(self, first_token: int, end_token: int) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        output = self._output
        return self._logprob_formatter.chat_logprobs(
            output.tokens[first_token:end_token], output.logprobs[first_token:end_token], self._top
        )

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, /, **values: Any) -> bytes:
        self._sequence_number += 1
        return sse_event({"type": kind, "sequence_number": self._sequence_number - 1, **values}, kind)
