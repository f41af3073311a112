"""The filters of sequence groups rank as many tokens as they need, and have the bits of a ranking of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.params import SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import LogitsParams
from swiftspec.sampling.row_sampler import RowSampler

VOCAB = 500
CPU = torch.device("cpu")


def rows() -> Tensor:
    """Raw logits with ties, an excluded token, and a row that is not finite."""
    logits = (4 * torch.randn(6, VOCAB + 4, generator=torch.Generator().manual_seed(1))).round(decimals=1)
    logits[1] = 0.0
    logits[2, 7], logits[3, 9] = -torch.inf, torch.nan
    return logits


@pytest.mark.parametrize(
    ("filters_of", "ranked"),
    [({"top_k": 20}, 20), ({"min_p": 0.05}, 1), ({"top_k": 7, "min_p": 0.2}, 7), ({"top_k": VOCAB + 9}, VOCAB),
     ({"top_p": 0.9}, VOCAB), ({"top_k": 20, "top_p": 0.95}, VOCAB)],
)  # fmt: skip
def test_as_many_tokens_as_needed_are_ranked(
    filters_of: dict[str, Any], ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0.7, **filters_of)
    values = LogitsParams(CPU)
    values.load(sampling, noisy=True)
    want = filters.apply_filters(rows()[:, :VOCAB] / values["temperature"], values, num_candidates=VOCAB)
    sizes, topk = list[int](), Tensor.topk

    def counted(logits: Tensor, count: int) -> Any:
        sizes.append(count)
        return topk(logits, count)

    def synchronised(certain: Tensor) -> bool:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(filters, "all_on_host", synchronised)
    monkeypatch.setattr(Tensor, "topk", counted)
    found = RowSampler(sampling, VOCAB, CPU, reference).target(rows())
    assert sizes == [ranked]
    assert torch.equal(found.view(torch.int32), want.view(torch.int32))
