"""The part that the writers of chat completions and completions share: a stream of choices, and its usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftspec.serve.format.generation_output import RequestOutputs
from swiftspec.serve.schema import StreamUsage
from swiftspec.serve.sse import DONE_EVENT, sse_event


class ChoiceWriter:
    """Base class of the formatters of a response that consists of choices.

    `usage`: the usage that a stream contains.
    `common_fields`: fields of the response and of each chunk.
    `has_logprobs`: whether it contains log-probabilities, which can take seconds to format.
    """

    def __init__(
        self, outputs: RequestOutputs, usage: StreamUsage, common_fields: Mapping[str, Any], has_logprobs: bool
    ) -> None:
        self.has_logprobs = has_logprobs
        self._outputs, self._usage, self._common_fields = outputs, usage, common_fields
        self._streaming = False

    def start_events(self) -> bytes:
        """Returns nothing: each choice begins with a chunk of its own."""
        self._streaming = True
        return b""

    def end_events(self) -> bytes:
        """Returns the usage chunk, if requested, and the end of the stream."""
        outputs, last = self._outputs, b""
        if self._usage.at_end:
            last = sse_event({**self._common_fields, "choices": [], "usage": outputs.usage(), **outputs.stats()})
        return last + DONE_EVENT

    def _end_chunk(self, choice: int, content: Mapping[str, Any]) -> bytes:
        """Returns the chunk with the finish reason. That of the last choice has the statistics of the request, unless
        the usage chunk has them."""
        output = self._outputs.outputs[choice]
        fields = {"finish_reason": output.finish_reason, **self._outputs.choice_end_fields(output)}
        stats = {} if self._usage.at_end else self._outputs.stats()
        return self._chunk(choice, content, len(output.tokens), None, fields, stats)

    def _chunk(
        self,
        choice: int,
        content: Mapping[str, Any],
        end_token: int,
        logprobs: Any = None,
        fields: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Returns a chunk. `content`: field with the new output. `end_token`: number of the choice's output tokens so
        far. `fields`: further fields of the choice. `more`: further fields of the chunk."""
        usage = {"usage": self._outputs.outputs[choice].usage_so_far(end_token)} if self._usage.in_chunks else {}
        item = {"index": choice, **content, "logprobs": logprobs, "finish_reason": None, **(fields or {})}
        return sse_event({**self._common_fields, "choices": [item], **usage, **(more or {})})
