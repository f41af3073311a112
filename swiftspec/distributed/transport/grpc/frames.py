"""Conversion between messages and the frames of a gRPC stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from swiftspec.distributed.transport.codec import Frame
from swiftspec.distributed.transport.grpc import swiftspec_pb2 as pb


def pack_grpc_frame(kind: int, words: Sequence[int] = ()) -> bytes:
    """Returns the bytes of a frame. Raises OverflowError if a number does not fit 32 bits."""
    return pb.Frame(opcode=kind, words=np.array(words, "<i4").tobytes()).SerializeToString()


def unpack_grpc_frame(data: bytes) -> Frame:
    """Returns opcode and words of a frame, the words as a memoryview. Raises ValueError on invalid bytes."""
    try:
        frame = pb.Frame.FromString(data)
    except DecodeError:
        raise ValueError(f"{len(data)} bytes are not a valid frame") from None
    if len(frame.words) % 4:
        raise ValueError(f"a frame contains {len(frame.words)} bytes, which are not 32-bit words")
    return frame.opcode, np.frombuffer(frame.words, "<i4").data
