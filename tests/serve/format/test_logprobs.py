"""Token strings in log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from swiftspec.serve.format.logprobs import LogprobFormatter
from swiftspec.serve.link.frames import TokenLogprob
from swiftspec.text.codec import TextCodec
from tests.support.toy_pair import byte_fallback_tokenizer, byte_level_tokenizer, write_tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_the_bytes_of_all_tokens_form_the_text(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    codec = TextCodec(write_tokenizer(tmp_path / "m", make(), None))
    scores, text = LogprobFormatter(codec), "def a é中😀 b"
    tokens = codec.encode(text)
    items = scores.chat_logprobs(tokens, [TokenLogprob(-float("inf"), [(token, -0.1)], 2) for token in tokens], 1)
    assert bytes(byte for item in items for byte in item["bytes"]).decode().strip() == text
    assert all(item["logprob"] == -9999.0 for item in items)
    halves = [item["token"] for item in items if item["token"].startswith("bytes:")]
    assert "bytes:\\xf0" in halves and len(halves) >= 4
