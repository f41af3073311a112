"""Several requests with a draft tree each on executors with CUDA graphs, with the stand-ins of tests/support."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec.backends.cuda import tree as cuda_tree
from swiftspec.builder import models
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.coroutines import PREFILL
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.graph import GraphCache
from swiftspec.runtime.sequence_runner import ForwardCall, ReadCall
from tests.batching.test_tree_batch import SHAPE, assert_idle, engine, read, requests_of
from tests.runtime.executors.test_graph_expansions import CudaTree
from tests.support.fake_cuda_graphs import Rerun
from tests.support.tiny_checkpoints import make_pair
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

SHAPES = {"draft_steps": 3, "verify_batch": 4, "draft_leaves": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = make_pair(tmp_path_factory.mktemp("graphs"), **SHAPE)
    write_tokenizer(target, byte_level_tokenizer())
    return target, draft


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> list[GraphCache]:
    """Makes engines with graphs, as on a GPU with the CUDA operators. Returns the caches of the graphs, in the order in
    which the models are loaded."""
    found = list[GraphCache]()

    def deps(ops: Any, fused: Any, capture: Any) -> ExecutorDeps:
        ops = ops.with_operators(MAX_CAPTURED_SEQUENCES=64, device_tree=cuda_tree.device_tree)
        made = ExecutorDeps(ops, None, Rerun())
        assert made.graphs is not None
        found.append(made.graphs)
        return made

    monkeypatch.setattr(models, "ExecutorDeps", deps)
    monkeypatch.setattr(cuda_tree, "_C", SimpleNamespace(CudaTree=CudaTree, Tree=cuda_tree._C.Tree))
    monkeypatch.setattr(cuda_tree, "current_stream", lambda: 0)
    monkeypatch.setattr(cuda_tree, "use_current_device", lambda: None)
    return found


@pytest.mark.parametrize(
    ("draft", "counts"),
    [("model", (2, 8)), pytest.param("model", (1, 4), marks=pytest.mark.slow), (None, (4,))],
)
def test_requests_decoded_together_equal_each_alone(
    pair: tuple[Path, Path], draft: str | None, counts: Sequence[int]
) -> None:
    """Also those that run alone between others, whose parameters the graphs have read."""
    prompts, sampling = requests_of(8)
    plain = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=128, dtype=torch.float64, ops="reference")
    wanted = [read(plain, [prompt], [each])[0][:2] for prompt, each in zip(prompts, sampling, strict=True)]
    for requests in counts:
        llm = engine(pair, draft, requests, dtype=torch.float64, ops="unfused", config=SHAPES if draft else {})
        assert [each[:2] for each in read(llm, prompts, sampling)] == wanted
        if requests == 2:
            alone = [llm.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
            assert [[each.token_ids, each.finish_reason] for each in alone] == wanted
        if requests > 1:
            assert_idle(llm)


def test_a_joint_call_is_one_replay_and_one_copy_to_the_host(
    pair: tuple[Path, Path], captured: list[GraphCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of graphs that were captured before the first request; a request alone has the graphs of whole phases."""
    joined, reads = list[tuple[int, int]](), list[int]()  # requests and replays of each joint forward; of each copy
    forward, copy = ForwardCall.run, ReadCall.run

    def replays() -> int:
        return sum(graphs.replays for graphs in captured)

    def counted(call: ForwardCall, others: Sequence[ForwardCall]) -> None:
        before = replays()
        forward(call, others)
        if call.priority != PREFILL:
            joined.append((1 + len(others), replays() - before))

    monkeypatch.setattr(ForwardCall, "run", counted)
    monkeypatch.setattr(ReadCall, "run", lambda call, others: (reads.append(1 + len(others)), copy(call, others))[1])
    llm = engine(pair, "model", 4, dtype=torch.float64, ops="unfused", config=SHAPES)
    ahead = [graphs.captures for graphs in captured]
    sampling = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=seed, temperature=seed % 2 * 0.8, top_k=seed % 3 * 20)
        for seed in range(4)
    ]
    prompts = [[5 + seed, 6, 7] for seed in range(4)]
    together = read(llm, prompts, sampling)
    assert {count for count, _ in joined} >= {4} and {replayed for _, replayed in joined} == {1}
    assert len(reads) == len(joined) and reads == [count for count, _ in joined]
    joined.clear()
    alone = [llm.generate(prompt, each).token_ids for prompt, each in zip(prompts, sampling, strict=True)]
    assert alone == [tokens for tokens, *_ in together] and not joined and replays() > 0
    assert [graphs.captures for graphs in captured] == ahead and min(ahead) > 0
