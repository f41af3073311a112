"""Rows of particles have the bits of tree nodes, whatever other requests are processed with them, and their filters
rank as many tokens as they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import Backend, reference
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import LogitsParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.smc.group_requests import GroupRequests
from swiftspec.smc.row_sampler import RowSampler

VOCAB = 500
CPU = torch.device("cpu")
PROMPT = [1, 7]
NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


def rows() -> Tensor:
    """Raw logits with ties, an excluded token, and a row that is not finite."""
    logits = (4 * torch.randn(6, VOCAB + 4, generator=torch.Generator().manual_seed(1))).round(decimals=1)
    logits[1] = 0.0
    logits[2, 7], logits[3, 9] = -torch.inf, torch.nan
    return logits


def requests_of(*sampling: SamplingParams, ops: Backend = reference) -> GroupRequests:
    """One group for each of these parameters."""
    runner = SimpleNamespace(model=SimpleNamespace(device=CPU), vocab=VOCAB, ops=ops, eos_token_ids=(3,))
    requests = GroupRequests(cast("Any", runner), len(sampling))
    for group, params in enumerate(sampling):
        requests.open(group, PROMPT, params, ())
    return requests


def sampler_of(*sampling: SamplingParams, ops: Backend = reference) -> RowSampler:
    """The sampler of groups that are all of one class."""
    (span,) = requests_of(*sampling, ops=ops).spans(len(sampling))
    return span.sampler


@pytest.mark.parametrize(
    ("filters_of", "ranked"),
    [({"top_k": 20}, filters.TOP_CANDIDATES), ({"min_p": 0.05}, 1), ({"top_k": 1}, 1),
     ({"top_k": 7, "min_p": 0.2}, filters.TOP_CANDIDATES), ({"top_k": 300}, VOCAB), ({"top_k": VOCAB + 9}, VOCAB),
     ({"top_p": 0.9}, VOCAB), ({"top_k": 20, "top_p": 0.95}, VOCAB)],
)  # fmt: skip
def test_enough_tokens_are_ranked(filters_of: dict[str, Any], ranked: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = sampler_of(sampling).target(rows())
    assert sizes == [ranked]
    assert torch.equal(found.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("name", ["", *FILTERS, *PENALTIES, "logit_bias", "allowed_token_ids"])
def test_rows_of_particles_have_the_logits_of_tree_nodes(name: str) -> None:
    other: dict[str, Any] = {"top_k": 9, "top_p": 0.7, "min_p": 0.1, "logit_bias": {3: -4.0, 5: 2.0}}
    values = {name: other.get(name, (7, 3, 8, 21) if name == "allowed_token_ids" else 1.5)} if name else {}
    sampling, output = SamplingParams(temperature=0.7, **values), [[5, 5], [3]]
    nodes, rows_ = Sampler(sampling, PROMPT, VOCAB, CPU), sampler_of(sampling)
    logits = rows()[:2]
    counts = torch.stack([torch.tensor(text).bincount(minlength=VOCAB) for text in output])
    penalised = rows_.penalise(logits[None], counts[None])[0]
    found = rows_.target(penalised)
    assert torch.equal(found, nodes.process_logits(logits, output))
    assert torch.equal(found, rows_.tempered(penalised)) == (name not in FILTERS), "filters shape the target alone"
    assert (name in PENALTIES) == rows_.penalised == sampling.penalised
    assert (name == "") == torch.equal(found, logits[:, :VOCAB] / 0.7), "every parameter has an effect"


CLASSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({"logit_bias": {3: -4.0, 5: 2.0}}, {"allowed_token_ids": (7, 3, 8, 21)}),
    ({"top_p": 0.9}, {"top_p": 0.7, "min_p": 0.1}), ({"top_k": 9}, {"top_k": 40, "min_p": 0.02}),
    ({"repetition_penalty": 1.3, "logit_bias": {5: 2.0}}, {"min_tokens": 2, "logit_bias": {4: 1.0}}),
]  # fmt: skip


@pytest.mark.parametrize("ops", [reference, pytest.param(cpu, marks=NATIVE)], ids=["reference", "cpu"])
@pytest.mark.parametrize(("first", "second"), CLASSES, ids=str)
def test_requests_of_one_class_do_not_affect_each_other(
    first: dict[str, Any], second: dict[str, Any], ops: Backend
) -> None:
    """Bitwise, with different temperatures and other parameters."""
    sampling = SamplingParams(0.7, **first), SamplingParams(1.3, **second)
    together = sampler_of(*sampling, ops=ops)
    logits, keys = rows(), torch.arange(6, dtype=torch.int32) * 977
    counts = torch.zeros(2, 3, VOCAB)
    counts[0, :, 5], counts[1, 1, 3] = 2, 1
    penalised = together.penalise(logits.unflatten(0, (2, 3)), counts)
    flat = penalised.flatten(0, 1)
    for group, params in enumerate(sampling):
        alone, mine = sampler_of(params, ops=ops), slice(3 * group, 3 * group + 3)
        wanted = alone.penalise(logits[None, mine], counts[group : group + 1])[0]
        pairs = [(penalised[group], wanted), (together.tempered(flat)[mine], alone.tempered(wanted))]
        pairs.append((together.target(flat)[mine], alone.target(wanted)))
        for power in (1.0, 2.0):
            drawn = zip(together.draw(flat, keys, power), alone.draw(wanted, keys[mine], power), strict=True)
            pairs += [(found[mine], want) for found, want in drawn]
        tokens = torch.arange(6) * 3
        pairs.append((together.log_probs(flat, tokens)[mine], alone.log_probs(wanted, tokens[mine])))
        for found, want in pairs:
            assert torch.equal(found.nan_to_num(nan=-1.5), want.nan_to_num(nan=-1.5))


def test_runs_of_classes() -> None:
    """Idle groups belong to the last run, so that they need no graphs of their own."""
    plain, filtered = SamplingParams(0.7), SamplingParams(0.7, top_p=0.9)
    requests = requests_of(plain, SamplingParams(1.3), filtered, plain)
    assert [count for _, count in requests.classes(4)] == [2, 1, 1]
    assert [span.groups for span in requests.spans(4)] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert [span.groups for span in requests.sampling_spans(4)] == [1, 1, 1, 1], "native spans have equal parameters"
    requests.num_running = 3
    assert [count for _, count in requests.classes(4)] == [2, 2]
    requests.num_running = 2
    assert [count for _, count in requests.classes(4)] == [4]
