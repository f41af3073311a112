"""Frames over a socket: complete ones in order, however the bytes arrive."""

from __future__ import annotations

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.messages import SampledLogprob
from swiftspec.params import SamplingParams
from swiftspec.serve.link import frames
from swiftspec.serve.link.engine_loop import prompt_logprob_parts, to_token_logprobs
from swiftspec.serve.link.frame_socket import FrameDecoder, FrameSocket, encode_frame
from swiftspec.serve.link.frames import FromEngine, FrontEndLost, ToEngine

START = frames.StartFrame(7, [1, 2, 3], SamplingParams(temperature=0.5, stop_token_ids=(4,)))


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_complete_and_in_order(cuts: list[int]) -> None:
    sent = [START, frames.CancelFrame(7), frames.ShutdownFrame(), START]
    data, found, reader = b"".join(map(encode_frame, sent)), [], FrameDecoder(ToEngine)
    while data:
        cut = cuts[0]
        cuts = cuts[1:] + cuts[:1]
        found += reader.push(data[:cut])
        data = data[cut:]
    assert found == sent


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", encode_frame(frames.DrainFrame()), b"\0\0\0\1\xc1"])
def test_an_invalid_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        FrameDecoder(ToEngine).push(data)


def test_sampling_parameters_are_unchanged_by_the_link() -> None:
    """Also numbers at the ends of their ranges, and mappings."""
    sampling = SamplingParams(
        temperature=1, seed=2**64 - 1, logit_bias={3: -1e9}, bad_words_ids=((1,), (2, 3)), allowed_token_ids=(4, 5),
        max_tokens=9, stop=("é",), logprobs=-1, negative_prompt_ids=(6,), guidance_scale=2, verify_batch=4,
    )  # fmt: skip
    start = frames.StartFrame(1, [2**31], sampling, (1, 2))
    assert FrameDecoder(ToEngine).push(encode_frame(start)) == [start]


def test_sampling_parameters_that_the_front_end_should_have_refused_are_an_invalid_frame() -> None:
    """Rank 0 loses the front end and serves the next one; any other exception would end it."""
    sampling = SamplingParams()
    sampling.top_p = 7.0  # an assignment is not checked
    near, far = socket.socketpair()
    with far:
        wire = FrameSocket(near)
        far.sendall(encode_frame(frames.StartFrame(1, [2], sampling)))
        with pytest.raises(FrontEndLost, match="top_p must be above 0 and at most 1, not 7"):
            wire.poll()
        wire.close(5)


def test_log_probabilities_are_unchanged_by_the_link() -> None:
    chunk = frames.TokensFrame(
        1, [5, 6], 1, [frames.TokenLogprob(-0.5, [(5, -0.5)], 1), frames.TokenLogprob(-1.0, [], 3)], "stop"
    )
    assert FrameDecoder(FromEngine).push(encode_frame(chunk)) == [chunk]


@pytest.mark.parametrize(
    ("tokens", "top"), [(3, 150_000), (20_000, 20), pytest.param(60_000, 4, marks=pytest.mark.slow)]
)
def test_the_log_probabilities_of_a_long_prompt_fit_their_frames(tokens: int, top: int) -> None:
    likeliest = tuple((1 << 20, -0.1) for _ in range(top))
    prompt = [SampledLogprob(-0.5, likeliest, position) for position in range(tokens)]
    parts = list(prompt_logprob_parts(prompt))
    assert [each for part in parts for each in part] == prompt
    for part in parts[:2]:
        frame = encode_frame(frames.TokensFrame(1, [], 0, to_token_logprobs(part)))
        assert len(frame) < frames.MAX_FRAME_BYTES // 4 and len(FrameDecoder(FromEngine).push(frame)) == 1


def test_rank_0_never_waits_for_a_front_end_that_does_not_read() -> None:
    near, far = socket.socketpair()
    with far:
        wire = FrameSocket(near)
        many = [frames.TokensFrame(1, list(range(1000)), 0) for _ in range(1000)]
        for chunk in many:
            wire.send(chunk)
        reader, found = FrameDecoder(FromEngine), []
        far.setblocking(False)
        while len(found) < len(many):
            assert wire.poll() is None
            try:
                found += reader.push(far.recv(1 << 20))
            except BlockingIOError:
                continue
        assert found == many
        wire.close(5)
        assert far.recv(1) == b""


def test_queued_frames_are_sent_before_closing() -> None:
    near, far = socket.socketpair()
    with far:
        wire = FrameSocket(near)
        wire.send(START)
        wire.close(5)
        assert FrameDecoder(ToEngine).push(far.recv(1 << 10)) == [START]


def test_closing_does_not_wait_for_a_front_end_that_does_not_read() -> None:
    near, far = socket.socketpair()
    with far:
        wire = FrameSocket(near)
        for _ in range(1000):
            wire.send(frames.TokensFrame(1, list(range(1000)), 0))
        wire.close(0.1)
        assert near.fileno() == -1


def test_a_lost_front_end_is_noticed_on_send() -> None:
    near, far = socket.socketpair()
    wire = FrameSocket(near)
    far.close()
    with pytest.raises(FrontEndLost, match="the HTTP front end disconnected"):
        while True:
            wire.send(START)
            time.sleep(0.001)
    wire.close(5)


def test_rank_0_polls_frames_and_a_second_descriptor() -> None:
    near, far = socket.socketpair()
    wakeup_fd, notify_fd = os.pipe()
    with far:
        wire = FrameSocket(near)
        far.sendall(encode_frame(START) + encode_frame(frames.CancelFrame(7)))
        assert wire.wait(wakeup_fd) == START
        assert wire.poll() == frames.CancelFrame(7)
        assert wire.poll() is None
        os.write(notify_fd, b".")
        assert wire.wait(wakeup_fd) is None
        far.close()
        os.read(wakeup_fd, 1)
        with pytest.raises(FrontEndLost):
            wire.wait(wakeup_fd)
        wire.close(5)
    os.close(wakeup_fd)
    os.close(notify_fd)
