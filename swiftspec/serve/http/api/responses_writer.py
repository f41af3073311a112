"""An answer in the shape of OpenAI's responses: a list of items, and an event for whatever happens to one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swiftspec.serve.http.app_context import number
from swiftspec.serve.http.format.answer import Answer, Part
from swiftspec.serve.http.format.logprobs import Scores
from swiftspec.serve.http.format.tools import Call
from swiftspec.serve.http.sse import event

THOUGHT, MESSAGE = "reasoning", "message"


class ResponseWriter:
    """Writes thoughts, a message and calls, each an item. `given`: what of the request is told again; `top`: so many
    likeliest tokens with each of the message's; None: no likelihoods."""

    def __init__(self, answer: Answer, given: Mapping[str, Any], scores: Scores, top: int | None) -> None:
        self._answer, self._scores, self._top = answer, scores, top
        self._head = {"id": number("resp_"), "object": "response", "created_at": int(time.time()), **given}
        self._items: list[dict[str, Any]] = []
        self._text = ""  # of the item that is open
        self._first = 0  # its first token
        self._open: str | None = None
        self._count = 0

    def begin(self) -> bytes:
        """The response, still empty."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, part: Part) -> bytes:
        """Deltas for each kind of text that the round has, and an item for each call."""
        out = b""
        if part.thought:
            out += self._opened(THOUGHT, part) + self._delta("response.reasoning_text.delta", part.thought)
        if part.said:
            out += self._opened(MESSAGE, part)
            logprobs = self._logprobs(part.first, part.last)
            out += self._delta("response.output_text.delta", part.said, logprobs=logprobs)
        for call in part.calls:
            out += self._closed(part.last) + self._call(call)
        return out

    def end(self) -> bytes:
        """What ended it, and the whole response."""
        out = self._closed(len(self._answer.tokens))
        if self._answer.finish_reason == "length":
            return out + self._event("response.incomplete", response=self.whole())
        return out + self._event("response.completed", response=self.whole())

    def whole(self) -> dict[str, Any]:
        """As one object."""
        answer = self._answer
        self._closed(len(answer.tokens))
        cut = answer.finish_reason == "length"
        usage = {
            "input_tokens": len(answer.prompt),
            "input_tokens_details": {"cached_tokens": answer.cached},
            "output_tokens": len(answer.tokens),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": len(answer.prompt) + len(answer.tokens),
        }
        done = self._response("incomplete" if cut else "completed", {"reason": "max_output_tokens"} if cut else None)
        return {**done, "usage": usage, **answer.cost()}

    def _response(self, status: str, incomplete: dict[str, str] | None = None) -> dict[str, Any]:
        state = {"status": status, "error": None, "incomplete_details": incomplete, "usage": None}
        return {**self._head, **state, "output": list(self._items)}

    def _opened(self, kind: str, part: Part) -> bytes:
        if self._open == kind:
            return b""
        out = self._closed(part.first)
        self._open, self._text, self._first = kind, "", part.first
        item: dict[str, Any] = {"id": number("rs_" if kind == THOUGHT else "msg_"), "type": kind, "content": []}
        item |= {"status": "in_progress"} | ({"summary": []} if kind == THOUGHT else {"role": "assistant"})
        self._items.append(item)
        out += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return out + self._event("response.content_part.added", **self._where(), part=self._content(self._first))

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        self._text += text
        return self._event(name, **self._where(), delta=text, **more)

    def _closed(self, last: int) -> bytes:
        """Ends the item that is open; its tokens end before `last`."""
        if self._open is None:
            return b""
        content = self._content(last)
        name = "response.reasoning_text.done" if self._open == THOUGHT else "response.output_text.done"
        more = {} if self._open == THOUGHT else {"logprobs": content["logprobs"]}
        out = self._event(name, **self._where(), text=self._text, **more)
        out += self._event("response.content_part.done", **self._where(), part=content)
        item = self._items[-1] = {**self._items[-1], "status": "completed", "content": [content]}
        self._open = None
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: Call) -> bytes:
        at, name = len(self._items), number("fc_")
        item = {"id": name, "type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._items.append(done)
        arguments = {"item_id": name, "output_index": at}
        return (
            self._event("response.output_item.added", output_index=at, item={**item, "status": "in_progress"})
            + self._event("response.function_call_arguments.delta", **arguments, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **arguments, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=at, item=done)
        )

    def _content(self, last: int) -> dict[str, Any]:
        if self._open == THOUGHT:
            return {"type": "reasoning_text", "text": self._text}
        text = {"type": "output_text", "text": self._text, "annotations": []}
        return {**text, "logprobs": self._logprobs(self._first, last)}

    def _logprobs(self, first: int, last: int) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        answer = self._answer
        return self._scores.chat(answer.tokens[first:last], answer.likelihoods[first:last], self._top)

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, name: str, **values: Any) -> bytes:
        self._count += 1
        return event({"type": name, "sequence_number": self._count - 1, **values}, name)
