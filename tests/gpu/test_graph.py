"""Graph replays equal the eager forwards that they were captured from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.data.heldout import DEMO
from swiftspec import _C
from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.linear import PeerCommunicator, make_inbox
from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.model.shard import Shard
from swiftspec.model.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from swiftspec.model.transformer import Transformer
from swiftspec.model.weights import DeltaWeights, DenseWeight, LayerWeights, ModelWeights
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import Capture, CudaCapture, GraphCache, GraphForwardExecutor
from swiftspec.runtime.executors.graph_expansions import GraphExpansionExecutor
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree import mask as tree_mask
from tests.gpu.device import DEVICE, EMULATED, most, needs_kernels, real
from tests.support.fake_cuda_graphs import Rerun
from tests.support.roles import make_drafter, make_runner, make_verifier
from tests.support.same_rounds import same_rounds, same_verifications

pytestmark = pytest.mark.gpu
SAMPLED = SamplingParams(temperature=0.8, seed=5)
ROUNDS, VOCAB = (1, 136) if EMULATED else (20, 4096)


def new_capture() -> Capture:
    return Rerun() if EMULATED else CudaCapture(Lock(), torch.device("cuda", torch.cuda.current_device()))


@real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replay_equals_eager_twice_in_a_row(dtype: torch.dtype) -> None:
    model = load_model(DEMO / "target", dtype=dtype, device="cuda", ops=unfused, max_positions=256)
    runners = [make_runner(model, unfused, context=160, tree_slots=32) for _ in range(2)]
    both = EagerExecutor(runners[0]), GraphForwardExecutor(runners[1], GraphCache(CudaCapture(Lock(), DEVICE)))
    noise = np.random.default_rng(1)
    prefix = noise.integers(0, 4096, 70).tolist()
    for steps in both:
        steps.runner.prefill(prefix)
        steps.open(ExecutorRequest(steps.runner.sampler(SamplingParams(temperature=0), ())))
    for rows in (8, 8, 3, 1, 8):
        tokens = noise.integers(0, 4096, rows)
        mask = tree_mask.from_parents([-1, *(int(noise.integers(0, i)) for i in range(1, rows))])
        want, got = (steps.forward(steps.runner.tree_batch(tokens, mask.sum(1) - 1, mask)).clone() for steps in both)
        # added rows may change how a library adds up
        assert (want - got).norm() <= (1e-5 if dtype == torch.float32 else 3e-2) * want.norm()
        for runner in runners:
            runner.cache.commit([0])


@real
@pytest.mark.parametrize("plan", [EngineConfig(), EngineConfig("async", draft_tp=0)], ids=["serial", "async"])
def test_the_gpu_generates_the_text_of_the_cpu(plan: EngineConfig) -> None:
    """Serially, and with both models concurrently on two streams of one GPU."""
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompt = list(range(50, 90))
    plain = LLMEngine(DEMO / "target", dtype=torch.float32, max_model_len=128, device="cpu").generate(prompt, sampling)
    pair: tuple[Path, Path, EngineConfig] = (DEMO / "target", DEMO / "draft", plan)
    tree = LLMEngine(*pair, dtype=torch.float32, max_model_len=128, ops="unfused", device="cuda").generate(
        prompt, sampling
    )
    assert tree.token_ids == plain.token_ids and tree.stats.drafter_lost is None


@real
def test_replays_of_a_hybrid_equal_eager_across_folds() -> None:
    model = random_hybrid(DEVICE)
    same_verifications(*hybrid_verifiers(model, CudaCapture(Lock(), DEVICE)), SAMPLED, VOCAB, prompt_len=50)


def hybrid_verifiers(model: Transformer, capture: Capture) -> tuple[LocalVerifier, LocalVerifier]:
    """One without graphs, one with them."""
    runners = [make_runner(model, unfused, context=256, tree_slots=64) for _ in range(2)]
    return make_verifier(runners[0]), make_verifier(runners[1], capture=capture)


def random_hybrid(device: torch.device) -> Transformer:
    """A delta layer and an attention layer with random weights, in float64."""
    mixer, heads = GatedDeltaSpec(2, 4, 16, 16, 4), AttentionSpec(4, 2, 16, rope=RopeSpec(10000.0))
    layers = (LayerSpec(mixer, MlpSpec(64)), LayerSpec(heads, MlpSpec(64)))
    spec = ModelSpec(VOCAB, 64, layers, norm_eps=1e-5, tie_word_embeddings=False)
    dice = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=dice, dtype=torch.float64) * 2 * size[-1] ** -0.5

    def layer(qkv_rows: int, delta: DeltaWeights | None) -> LayerWeights:
        one = torch.ones(64, dtype=torch.float64)
        qkv, o, gate_up, down = (DenseWeight(drawn(rows, 64)) for rows in (qkv_rows, 64, 128, 64))
        return LayerWeights(one, qkv, o, one, gate_up, down, delta=delta)

    def recurrent() -> LayerWeights:
        rates, conv = DenseWeight(drawn(8, 64)), drawn(128, 4)
        return layer(192, DeltaWeights(rates, conv, drawn(4) - 3, drawn(4), torch.ones(16, dtype=torch.float64)))

    weights = ModelWeights(
        drawn(VOCAB, 64), [recurrent, lambda: layer(128, None)], torch.ones(64, dtype=torch.float64),
        lambda: DenseWeight(drawn(VOCAB, 64)),
    )  # fmt: skip
    return Transformer(spec, weights, unfused, device, torch.float64, 512)


def random_model(group: Any = None, seed: int = 1) -> Transformer:
    """Two layers with heads of 64, which the CUDA operators support, and random weights; for a rank, its shard."""
    mixer = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(10000.0))
    layers = (LayerSpec(mixer, MlpSpec(512)),) * 2
    spec = ModelSpec(VOCAB, 256, layers, norm_eps=1e-5, tie_word_embeddings=False)
    config = replace(read_config(DEMO / "draft"), spec=spec)
    dice = torch.Generator().manual_seed(seed)

    def dense(outputs: int, inputs: int) -> DenseWeight:
        return DenseWeight(torch.randn(outputs, inputs, generator=dice).mul_(2 * inputs**-0.5))

    def layer() -> LayerWeights:
        qkv, gate_up, one = dense(512, 256), dense(1024, 256), torch.ones(256)
        return LayerWeights(one, qkv, dense(256, 256), one, gate_up, dense(256, 512))

    weights = ModelWeights(dense(VOCAB, 256).weight, [layer, layer], torch.ones(256), lambda: dense(VOCAB, 256))
    share = None if group is None else Shard.of(config, group.rank, group.size)
    weights = weights if share is None else share.cut(weights)
    return Transformer(spec, weights, cuda, DEVICE, torch.bfloat16, 512, shard=share, group=group)


def group_of_one(gather: Any = None, rows: int = 32) -> PeerMemoryGroup:
    """A group of one rank whose kernels sum up to `rows` rows and gather; `gather` handles longer messages."""
    lines = _C.cuda_lines(256, rows)
    box, error_word = make_inbox(1, lines, DEVICE), torch.zeros(2, dtype=torch.int64, pin_memory=not EMULATED)
    own = SimpleNamespace(communicator=PeerCommunicator(0, [box.data_ptr()], lines, error_word, DEVICE), box=box)
    library = SimpleNamespace(name="draft", rank=0, size=1, all_reduce=lambda x: x, all_gather=gather)
    ends: tuple[Any, Any, Any] = (None, library, own)
    return PeerMemoryGroup(*ends)


DRAFTS = [  # the cases for the emulated GPU come first and differ in every feature
    (mode, sampling, grouped)
    for sampling in (SamplingParams(temperature=0.8, seed=5), SamplingParams(temperature=0))
    for mode, grouped in (("serial", False), ("async", True), ("serial", True), ("async", False))
]
GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=5)
FILTERED = SamplingParams(temperature=0.8, seed=5, top_k=40, min_p=0.01, logit_bias={7: 4.0})
PENALISED = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.4)
CUT = SamplingParams(temperature=0.8, seed=5, top_p=0.8)
WIDE = SamplingParams(temperature=30.0, seed=5, top_p=0.95)  # more tokens than the filters' heads have
VERIFICATIONS = [
    (GREEDY, False), (FILTERED, True), (PENALISED, False), (GREEDY, True), (FILTERED, False), (PENALISED, True),
    *((sampling, grouped) for sampling in (SEEDED, CUT, WIDE) for grouped in (False, True)),
]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(("mode", "sampling", "grouped"), most(DRAFTS, 2), ids=str)
def test_a_draft_round_as_one_graph(mode: str, sampling: SamplingParams, grouped: bool) -> None:
    """The proposals equal those of expansions by the host, since rows do not depend on each other or on their slots.
    Also in a group, whose exchanges are part of the graph."""
    w, d = (2, 3) if EMULATED else (8, 4)
    config = EngineConfig(mode, verify_batch=w, draft_leaves=w, draft_steps=d)
    model = random_model(group_of_one() if grouped else None)
    eager, graphed = (
        make_drafter(make_runner(model, cuda, VOCAB, context=320, tree_slots=136), config, capture)
        for capture in (None, new_capture())
    )
    same_rounds(eager, graphed, sampling, VOCAB, rounds=ROUNDS)
    steps = graphed.executor
    assert isinstance(steps, GraphExpansionExecutor) and steps.graphs._graph_sets["expansions"]
    assert eager.executor.name == "eager"


@needs_kernels
@pytest.mark.parametrize(("sampling", "grouped"), most(VERIFICATIONS, 3), ids=str)
def test_a_verification_as_one_graph(sampling: SamplingParams, grouped: bool) -> None:
    """Every row equals the eager draw, although the batches of the graph are padded."""
    model = random_model(group_of_one(lambda x: x[None]) if grouped else None)
    eager, graphed = (
        make_verifier(make_runner(model, cuda, VOCAB, context=320, tree_slots=16), capture=capture)
        for capture in (None, new_capture())
    )
    same_verifications(eager, graphed, sampling, VOCAB, rounds=ROUNDS)
    assert isinstance(graphed.executor, GraphVerificationExecutor) and eager.executor.name == "eager"
