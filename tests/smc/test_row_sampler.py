"""Rows of particles have the bits of tree nodes, and their filters rank as many tokens as they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import LogitsParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.smc.row_sampler import RowSampler

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


@pytest.mark.parametrize("name", ["", *FILTERS, *PENALTIES, "logit_bias", "allowed_token_ids"])
def test_rows_of_particles_have_the_logits_of_tree_nodes(name: str) -> None:
    other: dict[str, Any] = {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "logit_bias": {3: -4.0, 5: 2.0}}
    values = {name: other.get(name, (7, 3, 8, 21) if name == "allowed_token_ids" else 1.5)} if name else {}
    sampling, prompt, output = SamplingParams(temperature=0.7, **values), [1, 7], [[5, 5], [3]]
    nodes, rows_ = Sampler(sampling, prompt, VOCAB, CPU), RowSampler(sampling, VOCAB, CPU, reference)
    logits, prompts = rows()[:2], torch.zeros(2, VOCAB, dtype=torch.bool)
    prompts[:, prompt] = True
    counts = torch.stack([torch.tensor(text).bincount(minlength=VOCAB) for text in output])[:, None]
    penalised = rows_.penalise(logits[:, None], prompts, counts, torch.zeros_like(prompts)).squeeze(1)
    found = rows_.target(penalised)
    assert torch.equal(found, nodes.process_logits(logits, output))
    assert torch.equal(found, rows_.tempered(penalised)) == (name not in FILTERS), "filters shape the target alone"
    assert (name in PENALTIES) == rows_.penalised == sampling.penalised
    assert (name == "") == torch.equal(found, logits[:, :VOCAB] / 0.7), "every parameter has an effect"
