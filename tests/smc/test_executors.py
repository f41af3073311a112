"""Population rounds as one native call equal eager rounds: the same tokens, weights, slots and caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftspec import _C
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.smc.group_spans import SamplingSpan
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.smc.sequence_group import SequenceGroup
from tests.model.test_loader import quantise
from tests.support.cases import fast_first
from tests.support.roles import request_start, restrict_executors, scheduler_of
from tests.support.tiny_checkpoints import make_pair

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

SHAPES: list[dict[str, Any]] = [
    {}, {"temperature": 1.1, "logit_bias": {5: 2.0}},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.7}, {"temperature": 1.2, "min_p": 0.05, "logit_bias": {5: -3.0}},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "min_tokens": 6, "logit_bias": {7: 4.0, 11: 4.0}},
]  # fmt: skip
SPAN = SamplingSpan(1, 0.8, None, None, None, 0)
FILTERED, PENALISED = (SamplingParams(top_k=5, presence_penalty=1).values_of(names) for names in (FILTERS, PENALTIES))
CONFIGS = {
    "smc": EngineConfig("smc", population=PopulationConfig(3, 3, 0.8, smc_groups=3)),
    "power": EngineConfig("smc", population=PopulationConfig(4, 2, 0.6, 2.0, smc_groups=3)),
    "at once": EngineConfig("smc", population=PopulationConfig(3, 3, 0.8, smc_groups=3, deferred_bonus=False)),
    "many": EngineConfig("smc", population=PopulationConfig(19, 2, 0.95, smc_groups=3)),
}


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16, intermediate_size=64)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = make_pair(tmp_path_factory.mktemp("int4"), head_dim=16, intermediate_size=64)
    quantise(made[0], "awq")
    return made


def worker(
    pair: tuple[Path, Path], config: EngineConfig, *names: str, dtype: torch.dtype = torch.bfloat16
) -> BatchScheduler:
    smc = scheduler_of(LLMEngine(*pair, config, max_model_len=96, dtype=dtype))
    assert [kind.name for kind in smc.executors] == ["native", "eager"]
    restrict_executors(smc, *names)
    return smc


def requests_of(count: int) -> Iterator[tuple[list[int], SamplingParams, int]]:
    """Prompts and limits of different lengths."""
    for i in range(count):
        sampling = SamplingParams(seed=i, stop_token_ids=(7, 11), **SHAPES[i % len(SHAPES)])
        yield [3 + i * j % 61 for j in range(1 + 31 * (i + 3) % 90)], sampling, 2 + 9 * i % 31


def same(one: BatchScheduler, other: BatchScheduler, live: Sequence[tuple[SequenceGroup, SequenceGroup]]) -> None:
    """Compares the groups that both have: the state of a round, and the KV of the slots in use."""
    for a, b in live:
        assert (a.tokens, a.all_finished) == (b.tokens, b.all_finished)
        mine, theirs = a.region, b.region
        assert (mine.used_slots, mine.compactions) == (theirs.used_slots, theirs.compactions)
        assert (mine.slot_states is None) == (theirs.slot_states is None)
        if mine.slot_states is not None and theirs.slot_states is not None:
            assert np.array_equal(mine.slot_states, theirs.slot_states)
        at = one.round.requests.order.index(a.sequence)
        for x, y in zip(one.round.tensors, other.round.tensors, strict=True):
            if x.is_floating_point():
                torch.testing.assert_close(x[at], y[at], atol=1e-4, rtol=1e-6)
            elif x.shape != one.round.particles._path.shape:
                assert torch.equal(x[at], y[at])
        p, q = one.round.particles, other.round.particles
        for row in range(p.count):
            length = int(p.length[at, row])
            assert length == q.length[at, row] and torch.equal(p.tokens[at, row, :length], q.tokens[at, row, :length])
        written = p.mask[at].any(0)
        written[p.tail_slots[at].flatten()] = False  # not written yet, or a finished row's
        for r, s in ((one.target, other.target), (one.draft, other.draft)):
            start = r.cache.prefix_len[a.sequence]
            assert start == s.cache.prefix_len[b.sequence]
            slots = torch.cat((torch.arange(start), start + written.nonzero().flatten()))
            for x, y in ((r.cache.kv.k, s.cache.kv.k), (r.cache.kv.v, s.cache.kv.v)):
                assert torch.equal(x[:, a.sequence][:, :, slots], y[:, a.sequence][:, :, slots])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("models", fast_first(["int4", "bf16"], 1))
def test_native_rounds_equal_eager_rounds(request: pytest.FixtureRequest, models: str, name: str) -> None:
    """Round by round, while requests are admitted, finish and are cancelled."""
    pair, config = request.getfixturevalue(models), CONFIGS[name]
    workers = worker(pair, config, "native"), worker(pair, config, "eager")
    waiting = requests_of(9 if models == "bf16" else 5)
    live, rounds, ended = list[tuple[SequenceGroup, SequenceGroup]](), 0, 0
    while True:
        while len(live) < 3 and (admitted := next(waiting, None)) is not None:
            prompt, sampling, limit = admitted
            a, b = (each.admit(request_start(prompt, sampling), {7, 11}, limit) for each in workers)
            live.append((a, b))
        if not live:
            break
        assert workers[0].launch() == workers[1].launch()
        for each in workers:
            each.collect()
        rounds += 1
        same(*workers, live)
        for a, b in [*live]:
            if not a.is_finished and rounds % 7 != 5:
                continue
            one, other = workers[0].finish(a), workers[1].finish(b)
            assert one.tokens == other.tokens
            assert one.log_z == pytest.approx(other.log_z, abs=1e-4)
            for each, group in zip(workers, (a, b), strict=True):
                each.evict_group(group)
            live.remove((a, b))
            ended += 1
    assert ended == (9 if models == "bf16" else 5) and rounds >= 5


@pytest.mark.parametrize(("name", "drafts"), [("smc", [0, 6, 3, 3]), ("at once", [0, 3, 3, 3, 3])])
def test_hooks_are_called_for_every_forward(name: str, drafts: list[int], bf16: tuple[Path, Path]) -> None:
    calls = dict[str, list[tuple[list[int], bool]]]()
    for kind in ("native", "eager"):
        smc, rows = worker(bf16, CONFIGS[name], kind), {"target": [0], "draft": [0]}
        smc.admit(request_start([1, 2], SamplingParams(0.8)), (), 9)
        for runner, mine in ((smc.target, rows["target"]), (smc.draft, rows["draft"])):
            runner.hooks.append(lambda began, count, mine=mine: mine.append(count))
        busy = smc.busy
        smc.launch()
        calls[kind] = [(mine, now > then) for mine, now, then in zip(rows.values(), smc.busy, busy, strict=True)]
    assert calls["native"] == calls["eager"] == [([0, 12], True), (drafts, True)]


def test_an_invalid_round_is_refused(bf16: tuple[Path, Path]) -> None:
    smc = worker(bf16, CONFIGS["smc"], "native")
    smc.admit(request_start([1, 2], SamplingParams(0.8)), (), 9)
    smc.launch()
    native: Any = smc.executors[0]
    head = np.empty((1, smc.round.header_len + 16), np.int64)
    spoilt = {"slots_used": "the tree's region is full", "prefix": "the rows do not fit the cache"}
    for name, message in spoilt.items():
        tensor = smc.round.requests.prefix if name == "prefix" else smc.round.particles.slots_used
        before = tensor.clone()
        tensor.fill_(100_000)
        with pytest.raises(ValueError, match=message):
            native._native.round([SPAN], head, None)
        tensor.copy_(before)
    for changed, message in (
        ({"groups": 4}, "as many groups as there are"),
        ({"min_tokens": -1}, "a min_tokens of at least 0"),
        ({"filters": FILTERED | {"top_p": 1.5}}, "a filter is out of range"),
        ({"temperature": 0.0}, "a temperature above 0"),
        ({"filters": {"top_k": 5}}, "expected the filters"),
        ({"penalties": PENALISED | {"repetition_penalty": 0.0}}, "the repetition penalty must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            native._native.round([SPAN._replace(**changed)], head, None)
    with pytest.raises(ValueError, match="slots in use, ascending"):
        native._native.compact(0, 0, [3, 2])
