"""Hidden states of prompt and accepted path: every executor provides those of the eager one, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from swiftspec.runtime.verifier import LocalVerifier
from tests.support.fake_cuda_graphs import Recorder
from tests.support.proposals import draft_proposal
from tests.support.roles import make_runner, make_verifier, request_start, restrict_executors
from tests.support.same_rounds import folded_counts, same_verifications
from tests.support.tiny_checkpoints import chain, make_checkpoint

VOCAB = 300
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, seed=5)
GUIDED = SamplingParams(temperature=0, guidance_scale=1.5, negative_prompt_ids=(2, 3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, layers=3, hidden_size=64, dtype=torch.float32)
    return path


def verifier_on(path: Path, executor: str, ops: Any, dtype: torch.dtype) -> LocalVerifier:
    model = load_model(path, dtype=dtype, ops=ops, max_positions=700, hidden_layers=(0, 2))
    verifier = make_verifier(make_runner(model, ops, context=600, tree_slots=64), capture=Recorder())
    restrict_executors(verifier, executor)
    return verifier


@pytest.mark.sampled(2)
@pytest.mark.parametrize("executor", ["graph", "graph forwards"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(temperature=30.0, top_p=0.95)], ids=["greedy", "sampled", "top-p"]
)
def test_graph_executors(checkpoint: Path, executor: str, sampling: SamplingParams) -> None:
    """Trees of changing size, also if rows are sampled outside the graph: `same_verifications` compares them."""
    eager, graphed = (verifier_on(checkpoint, name, unfused, torch.float64) for name in ("eager", executor))
    same_verifications(eager, graphed, sampling, VOCAB, rounds=4)
    assert graphed.executor.name == executor and graphed.accepted_hidden() is not None


@pytest.mark.slow
def test_graphs_of_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when positions are folded between the rounds."""
    make_checkpoint(tmp_path, family="qwen3_5_text", vocab=VOCAB, dtype=torch.float64)
    eager, graphed = (verifier_on(tmp_path, name, unfused, torch.float64) for name in ("eager", "graph"))
    folded = folded_counts(graphed.runner, monkeypatch)
    same_verifications(eager, graphed, SAMPLED, VOCAB, prompt_len=50)
    assert graphed.executor.name == "graph" and {0, 32} <= folded


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_executor(checkpoint: Path, dtype: torch.dtype) -> None:
    """Bitwise identical, for chains and trees."""
    eager, native = (verifier_on(checkpoint, name, host, dtype) for name in ("eager", "native"))
    dice, root, previous = np.random.default_rng(2), 6, 0
    for verifier in (eager, native):
        verifier.open(request_start([3, 1, 4, 1, 5, root], SAMPLED))
    for round_, parents in enumerate([(-1, 0, 1, 2), (-1, 0, 0, 1, 1, 4), (-1,), (-1, 0, 0, 1)] * 2):
        tokens, at = [root, *dice.integers(0, VOCAB, len(parents) - 1).tolist()], eager.runner.cache.prefix_len[0]
        guess = draft_proposal(1, round_, at, tokens, parents)
        for child in [node for node, parent in enumerate(parents) if parent == 0][:1]:  # one child is accepted
            tokens[child] = eager.verify(guess).tokens[0]
            eager.runner.cache.commit(())
        proposal = draft_proposal(1, round_, at, tokens, parents)
        results = [verifier.verify(proposal) for verifier in (eager, native)]
        want, got = (verifier.accepted_hidden() for verifier in (eager, native))
        assert want is not None and got is not None
        assert want.shape == (len(results[0].path), 2, 64) and want.dtype == torch.float32 and torch.equal(want, got)
        previous += len(results[0].path) > 1
        root = results[0].tokens[-1]
        for verifier in (eager, native):
            verifier.settle()
    assert previous > 0


def prompt_rows(verifier: LocalVerifier, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Tensor]:
    """The positions and hidden states that the hook receives while a request opens."""
    found: list[tuple[int, Tensor]] = []
    verifier.runner.on_prompt_hidden = lambda first, hidden: found.append((first, hidden.clone()))
    verifier.open(request_start(prompt, sampling))
    verifier.close()
    return [first for first, _ in found], torch.cat([hidden for _, hidden in found])


@pytest.mark.parametrize("sampling", [GREEDY, GUIDED], ids=["plain", "guided"])
def test_prompt_rows(checkpoint: Path, sampling: SamplingParams) -> None:
    """Of every token but the last, which becomes the root, in chunks; with guidance those of the prompt itself."""
    prompt = np.random.default_rng(1).integers(0, VOCAB, PREFILL_CHUNK_TOKENS + 20).tolist()
    eager = verifier_on(checkpoint, "eager", reference, torch.float64)
    positions, got = prompt_rows(eager, prompt, sampling)
    cache = make_runner(eager.runner.model, reference, context=600, tree_slots=1).cache
    want = eager.runner.model.forward(chain(prompt[:-1]), cache, head=False).hidden
    assert positions == [0, PREFILL_CHUNK_TOKENS] and want is not None
    torch.testing.assert_close(got, want)
    if _C.level() != "none" and sampling is GREEDY:
        stepped, native = (verifier_on(checkpoint, name, host, torch.bfloat16) for name in ("eager", "native"))
        stepped.runner.model.fused = None
        rows = [prompt_rows(verifier, prompt, sampling)[1] for verifier in (stepped, native)]
        assert torch.equal(*rows)


def test_guided_verifications_provide_the_conditional_rows(checkpoint: Path) -> None:
    verifier = verifier_on(checkpoint, "eager", reference, torch.float64)
    verifier.open(request_start([3, 1, 4], GUIDED))
    verifier.verify(draft_proposal(1, 0, 2, (4,), (-1,)))
    cache = make_runner(verifier.runner.model, reference, context=9, tree_slots=1).cache
    want, got = verifier.runner.model.forward(chain([3, 1, 4]), cache).hidden, verifier.accepted_hidden()
    assert want is not None and got is not None
    torch.testing.assert_close(got, want[-1:])
