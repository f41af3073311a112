"""Random pairs: their int4 codes have the mean 0, and both kinds of targets decode with their drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import random_pairs
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams

SMALL = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"num_hidden_layers": 4, "num_key_value_heads": 1, "linear_num_key_heads": 2},
    "a3b": {"num_hidden_layers": 2, "num_key_value_heads": 1, "moe_intermediate_size": 128},
}


def test_codes_lie_around_the_zero_point() -> None:
    torch.manual_seed(0)
    words = random_pairs.int4_tensors("w", 256, 128)["w.qweight"]
    codes = torch.stack([words >> 4 * i & 15 for i in range(8)])
    assert int(codes.min()) == 1 and int(codes.max()) == 15 and abs(float(codes.float().mean()) - 8) < 0.1


@pytest.mark.parametrize("pair", random_pairs.PAIRS)
def test_a_draft_agrees_and_does_not_change_the_text(tmp_path: Path, pair: str) -> None:
    torch.manual_seed(0)
    for name, fields in random_pairs.PAIRS[pair].items():
        more = {"linear_num_value_heads": 4} if pair == "qwen3.5" else {"num_experts": 4, "num_experts_per_tok": 2}
        random_pairs.write_checkpoint(tmp_path / name, fields | SMALL | SIZES[pair] | more, 0.75)
    target, draft = (tmp_path / name for name in random_pairs.PAIRS[pair])
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)
    want = LLMEngine(target, max_model_len=128).generate([3, 5, 8], sampling).token_ids
    answer = LLMEngine(target, draft, EngineConfig("serial"), max_model_len=128).generate([3, 5, 8], sampling)
    assert answer.token_ids == want and answer.stats.accepted > 20
