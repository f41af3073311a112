"""Drafters whose model runs on a worker, on another machine or on another device of this one.

`GrpcDrafter` sends a result and receives the next proposal, as `DraftGroupClient` does between rank groups; it is used
in serial mode and with sampled children. In all other cases a replica of the worker's tree proposes on the client
(`ReplicaDrafter`). `GrpcTreeDeltaLink` is its connection: it sends results to the worker and receives tree deltas,
asynchronously in both directions.
"""

from __future__ import annotations

import contextlib
import time

from swiftspec.distributed.draft.client import DrafterLate
from swiftspec.distributed.rpc.draft_stream import DraftStream
from swiftspec.distributed.rpc.protobuf_codec import delta_from_proto, proposal_from_proto
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.tree.replica import TreeDelta


class GrpcDrafter:
    """Drafter on a worker. Every call may raise DrafterLost; after DrafterLate, `propose` can be called again."""

    def __init__(self, stream: DraftStream) -> None:
        self.draft_steps = stream.shape.initial_draft_steps  # d; sent with the next message
        self._stream = stream
        self._buffered: Proposal | None = None  # an answer that `poll` has received for `propose`

    @property
    def busy(self) -> float:
        return self._stream.busy

    def open(self, start: RequestStart) -> None:
        self._buffered = None
        self._stream.open(start, self.draft_steps)

    def propose(self) -> Proposal:
        held, self._buffered = self._buffered, None
        return held or self._recv_proposal(time.monotonic() + self._stream.timeout_s)

    def poll(self) -> bool:
        """Returns whether the proposal that follows the last result has arrived. Does not block."""
        with contextlib.suppress(DrafterLate):
            self._buffered = self._buffered or self._recv_proposal(None)
        return self._buffered is not None

    def grow(self) -> None:
        pass  # the worker expands without a request

    def observe(self, result: VerifyResult) -> None:
        self._buffered = None
        self._stream.send_result(result, self.draft_steps)

    def catch_up(self, result: VerifyResult) -> None:
        """Sends `result`, which merges the rounds that were decoded without the draft."""
        self.observe(result)

    def close(self) -> None:
        self._stream.close()

    def _recv_proposal(self, until: float | None) -> Proposal:
        """Returns the proposal of the current round; discards late proposals of earlier rounds. `until`: see
        `DraftStream.recv`."""
        standing = self._stream.state
        while True:
            answer = self._stream.recv(until)
            try:
                proposal = proposal_from_proto(answer.proposal)
                if (proposal.request, proposal.round) == (standing.request, self._stream.round):
                    standing.check_proposal(proposal)
                    return proposal
            except ValueError as error:
                raise self._stream.protocol_error(error) from None


class GrpcTreeDeltaLink:
    """A `TreeDeltaLink` (runtime/replica_drafter.py) over a worker's stream."""

    def __init__(self, stream: DraftStream) -> None:
        self._stream = stream

    @property
    def busy(self) -> float:
        return self._stream.busy

    @property
    def answer_timeout_s(self) -> float:
        return self._stream.timeout_s

    def open(self, start: RequestStart) -> None:
        self._stream.open(start, 0)

    def send(self, result: VerifyResult) -> None:
        self._stream.send_result(result, 0)

    def receive(self, deadline: float | None) -> TreeDelta | None:
        """Returns the next tree delta. Raises DrafterLate if it has not arrived at `deadline`, a `time.monotonic` time.
        Without a deadline, returns None if no tree delta has arrived yet."""
        try:
            answer = self._stream.recv(deadline)
        except DrafterLate:
            if deadline is None:
                return None
            raise
        if not answer.HasField("delta"):
            raise self._stream.protocol_error("a response without a tree delta")
        return delta_from_proto(answer.delta)

    def close(self) -> None:
        self._stream.close()
