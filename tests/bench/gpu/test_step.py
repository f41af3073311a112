"""How bench/gpu/step.py computes its figures; tests/tools/test_gpu_queue.py has a whole run of it."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.data.heldout import DEMO, read_token_ids
from bench.gpu import step
from bench.gpu.round_bytes import forward_bytes, round_share
from bench.smc_groups import ABLATED
from swiftspec.backends.unfused import unfused
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.runtime.executors.graph import FORWARD_GRAPHS, GraphForwardExecutor
from tests.support.fake_cuda_graphs import Rerun
from tests.support.ranks import Pool
from tests.support.roles import make_drafter, make_runner
from tools.width_expand.shapes import FIELDS, grown_config


def test_prompts_use_the_demo_tokenizer() -> None:
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(DEMO / "target"), read_token_ids(8)
    assert len(prompts) == 8 and all(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in prompts)


def test_agreement() -> None:
    assert step.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def arguments(**changed: Any) -> Namespace:
    usual: dict[str, Any] = {
        "prompts": 1, "tokens": 8, "context": 64, "device": "cpu", "ops": "auto", "steps": 2, "head": "auto",
        "kv_cache_dtype": "auto", "split": None, "modes": list(step.MODES), "rows": [], "trees": [],
        "multiprocessors": None, "tuned": None,
        "particles": None, "draft_tokens": 4, "ablate": False,
    }  # fmt: skip
    return Namespace(**usual | changed)


@pytest.mark.slow
def test_every_mode_decodes_with_the_roles_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On shared models. On a CPU the streams of the overlapped mode do nothing, and the check for a GPU is left out."""
    create, loaded, roles = Plan.create, [], dict[str, tuple[str, str]]()

    def anywhere(target: Any, draft: Any, plan: EngineConfig, *others: Any) -> Plan:
        if not plan.overlap_on_one_gpu:
            return create(target, draft, plan, *others)
        return replace(create(target, draft, EngineConfig("serial"), *others), engine=plan)

    class Recorded(step.LLMEngine):
        def __init__(self, target: Any, draft: Any, config: EngineConfig, **options: Any) -> None:
            super().__init__(target, draft, config, **options)
            parts: Any = self.roles.inner_roles
            roles[config.mode] = type(parts.drafter).__name__, type(parts.verifier).__name__

    def counted(path: Any, **options: Any) -> Any:
        loaded.append((path.name, options["quantization"].head))
        return load_model(path, **options)

    monkeypatch.setattr(Plan, "create", staticmethod(anywhere))
    monkeypatch.setattr(step, "LLMEngine", Recorded)
    monkeypatch.setattr(step, "load_model", counted)
    parts: list[set[str]] = []
    found = step.measure("demo", arguments(head="int4"), lambda result: parts.append(set(result)))
    assert roles == {
        "serial": ("LocalDrafter", "TargetVerifier"), "ar": ("NoDrafter", "TargetVerifier"),
        "async": ("OverlappedDrafter", "ThreadedVerifier"),
    }  # fmt: skip
    assert loaded == [("target", "int4"), ("draft", "int4")]
    assert found["tree equals ar"] == found["adapt equals ar"] == found["async equals ar"] == 1.0
    assert found["adapt"].keys() - found["serial"].keys() == {"d", "bs"}
    assert {*step.MODES, "step ms", "ops"} <= set(found) and "ar" not in parts[0]


def test_a_split_needs_its_ranks() -> None:
    with pytest.raises(UserError, match="requires 8 ranks: start it with torchrun --standalone --nproc-per-node 8"):
        step.run_split(arguments(split=[6, 2]), print)
    config = step.config_of("async", arguments(split=[6, 2]))
    assert (config.mode, config.target_tp, config.draft_tp) == ("async", 6, 2)


@pytest.mark.slow
def test_a_width_expanded_pair_decodes_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    """The text is that of one rank; each rank builds its own models in memory."""
    shapes = []
    for role, sizes in (("target", (512, 9, 8, 2, 128, 1152, 4224)), ("draft", (256, 3, 8, 2, 64, 512, 4224))):
        config = grown_config(DEMO / role, dict(zip(FIELDS, (*sizes, False), strict=True)), "int4")
        shapes.append(str(tmp_path / f"{role}.json"))
        Path(shapes[-1]).write_text(json.dumps(config))
    short = ["--pair", ",".join(shapes), "--device", "cpu", "--prompts", "1", "--tokens", "12", "--context", "64"]
    short += ["--ops", "unfused"]  # without int8 activations, which change the text
    found, nothing = pool.run(2, "split_decode", argv=[*short, "--split", "1+1"])
    assert nothing is None
    assert found["same text"] > 0.4 and found["async"]["tok/round"] > 1.5 and found["split"] == [1, 1]


def test_configurations_of_a_grown_pair_allow_the_context() -> None:
    shape = "Llama-3.2-1B"
    with step.models_of(f"{shape},{shape}", 40_000) as (paths, _):
        assert [read_config(path).max_position_embeddings for path in paths] == [40_000, 40_000]


@pytest.mark.slow
def test_particles_are_measured_after_a_warm_up_on_shared_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 nothing would be sampled, and mode smc refuses it."""
    made: list[object] = []
    whole = step.load_model

    def counted(*path: Any, **options: Any) -> Any:
        made.append(path)
        return whole(*path, **options)

    monkeypatch.setattr(step, "load_model", counted)
    monkeypatch.setattr(step, "copy_speed", lambda device: 1.0)
    args = arguments(tokens=5, particles=[2, 3], draft_tokens=1, ablate=True)
    calls: list[set[str]] = []
    found = step.measure_particles("demo", args, lambda result: calls.append(set(result)))
    names = [f"smc {count}{end}" for count in (2, 3) for end in ("", *(f", without the {part}" for part in ABLATED))]
    assert {*names} < {*found} and len(made) == 2
    assert "smc 3" in calls[0] and "smc 2" not in calls[0]
    assert all(found[name]["ratio to ar"] == found[name]["tok/s"] / found["ar"]["tok/s"] for name in names)
    assert found["smc 2"]["round GB"] > found["ar"]["round GB"]


def test_a_round_reads_weights_and_caches_once_per_forward() -> None:
    size = MemoryEstimate(read_config(DEMO / "draft"), torch.bfloat16, 0)
    stored = load_file(DEMO / "draft" / "model.safetensors")  # the embedding is tied, and read whole as the head
    assert forward_bytes(size, 0) == pytest.approx(sum(tensor.nbytes for tensor in stored.values()), rel=0.01)
    mixers = size.config.spec.attention_mixers
    assert forward_bytes(size, 10) - forward_bytes(size, 0) == 10 * 2 * 2 * sum(mixer.kv_size for mixer in mixers)
    share = round_share({"tok/s": 100.0, "tok/round": 2.0}, size, size, forwards=3, context=10, copy=1.0)
    assert share["round GB"] == pytest.approx(4 * forward_bytes(size, 10) / 1e9)
    assert share["of copy"] == pytest.approx(share["round GB"] * 50)


def test_a_step_is_timed_as_a_graph_if_the_model_can_be_captured() -> None:
    """One capture for all repetitions, and another one after the graphs are dropped."""
    model = load_model(DEMO / "draft", dtype=torch.float32, ops=unfused, max_positions=128)
    config, capture = EngineConfig(verify_batch=4, draft_leaves=4, draft_steps=2), Rerun()
    for given in (None, capture):
        drafter = make_drafter(make_runner(model, unfused, context=96, tree_slots=32), config, given)
        assert step.step_time(drafter, 4, 64) > 0
        assert drafter.runner.cache.kv_len()[0] == 0
        for steps in drafter.executors:
            if isinstance(steps, GraphForwardExecutor):
                steps.graphs.evict(FORWARD_GRAPHS)
                step.step_time(drafter, 4, 64)
    assert capture.captures == 2 and capture.replays == 2 * (step.REPEATS + 2)
