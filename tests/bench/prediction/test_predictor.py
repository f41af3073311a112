"""The predictor: rounds computed by hand, the latency model against its source table, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.prediction import latency_model, machine, simulation
from bench.prediction.predictor import main
from bench.prediction.simulation import SimulatedTimes
from swiftspec.errors import UserError
from swiftspec.model.config_json import parse_config
from swiftspec.profiles import emulation
from swiftspec.text.codec import TextCodec
from tests.support.profiles import profile, run
from tests.support.ranks import Pool

ROUNDS = [(1, 0), (2, 1), (0, 0)]  # accepted, expansions on the critical path


def llama(layers: int, hidden: int, heads: int, kv: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": inner, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        **more,
    }  # fmt: skip


LLAMA_70B = llama(80, 8192, 64, 8, 28672)
LLAMA_3B = llama(28, 3072, 24, 8, 8192, head_dim=128)


def test_a_round_in_which_the_draft_has_time() -> None:
    found = simulation.asynchronous([(1, 0)] * 4, 2, SimulatedTimes(10, 3))
    assert (found.round, found.waiting, found.tokens_per_round) == (10, 0, 2)
    assert found.speed == pytest.approx(0.2)


def test_a_draft_that_is_late_or_must_expand_first() -> None:
    late = simulation.asynchronous([(1, 0)] * 4, 4, SimulatedTimes(10, 3))
    assert (late.round, late.waiting) == (12, 2)
    short = simulation.asynchronous([(0, 1)] * 4, 2, SimulatedTimes(10, 3))
    assert (short.round, short.waiting) == (13, 3)


def test_overhead_is_counted_on_the_side_where_it_occurs() -> None:
    times = SimulatedTimes(10, 3, verify=0.5, settle=0.4, expand=0.25, answer=0.3, link=0.1)
    assert simulation.asynchronous(ROUNDS, 2, times).round == pytest.approx(10.5 + 0.3 + 0.2 + 3.25 / 3)
    assert simulation.serial(ROUNDS, 2, times).round == pytest.approx(10.5 + 0.4 + 0.3 + 2 * 3.25)
    assert simulation.plain(times).round == pytest.approx(10.9)


def test_expansions_longer_than_a_round_delay_the_next_one() -> None:
    """An expansion on the critical path delays the target, which lets the draft catch up."""
    found = simulation.asynchronous([(0, 0), (0, 1), (0, 0)], 4, SimulatedTimes(10, 3))
    assert found.round * 3 == pytest.approx(12 + 15 + 12)


def test_the_interval_contains_the_estimate() -> None:
    rounds = [(i % 5, i % 3 == 0) for i in range(200)]
    low, middle, high = simulation.interval("async", rounds, 3, SimulatedTimes(11, 3.3), SimulatedTimes(9, 2.7))
    assert low < middle < high


@pytest.mark.parametrize(
    ("config", "tp", "slow", "fast"),
    [(LLAMA_70B, 1, 13.32, 11.41), (LLAMA_70B, 4, 5.21, 4.19), (LLAMA_3B, 1, 1.24, 1.04), (LLAMA_3B, 4, 0.98, 0.73)],
)
def test_the_latency_model_reproduces_its_source_table(
    config: dict[str, Any], tp: int, slow: float, fast: float
) -> None:
    made = [
        latency_model.forward(parse_config(config), tp, 8, c, True)
        for c in latency_model.constants(latency_model.GPUS["h200"])
    ]
    assert [1e3 * t for t in made] == pytest.approx([slow, fast], rel=0.08)


def test_measured_operators_replace_targets(tmp_path: Path) -> None:
    file = tmp_path / "h200-kernels.json"
    points = [{"op": "linear", "bytes": size, "us": 4.0 + size / 2e6} for size in (1e6, 5e6, 50e6)]
    file.write_text(json.dumps({"points": points}))
    slow, fast = latency_model.fitted(file, latency_model.GPUS["h200"])
    assert slow.origin == "measured"
    assert (slow.linear.fixed, slow.linear.bandwidth) == (pytest.approx(4e-6), pytest.approx(2e12))
    assert fast.attention == latency_model.constants(latency_model.GPUS["h200"])[1].attention
    file.write_text("{}")
    with pytest.raises(UserError, match="contains no measured operators"):
        latency_model.fitted(file, latency_model.GPUS["h200"])


def test_the_command_predicts_a_node_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, config in (("target", LLAMA_70B), ("draft", LLAMA_3B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    models = ["--model", str(tmp_path / "target" / "config.json"), "--draft-model", str(tmp_path / "draft")]
    assert main(["--hardware", "h200x8", "--int4", *models]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("async")]) == 7
    assert "operators: predicted, link: predicted; acceptance: measured on the demo models" in out


def test_prediction_is_compared_with_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{"plan": {"mode": mode, "verify_batch": 8, "draft_leaves": 8, "draft_steps": d}, "rounds": [[d, 0]] * 20}
              for mode in ("serial", "async") for d in (1, 2)]  # fmt: skip
    around = dict.fromkeys(("verify", "settle", "expand", "answer", "link"), 0.0)
    whole = profile(run("async", 1, 1, 250.0, d=2), run("serial", 2, 2, 187.5, d=2), rounds=rounds, around=around)
    whole["key"]["ranks"] = 2
    (tmp_path / "p.json").write_text(json.dumps(whole))
    spec = ["--emulate", "target=10ms,draft=5ms", "--ranks", "2", "--against", str(tmp_path / "p.json")]
    assert main([*spec]) == 0
    out = capsys.readouterr().out
    assert "async 1+1    predicted   300.0  measured   250.0 (d 2)  +20.0%" in out
    assert "serial 2     predicted   150.0  measured   187.5 (d 2)  -20.0%" in out
    assert "the predicted best, async 1+1, reaches 100.0% of the measured best" in out
    whole["runs"].append(run("async", 1, 1, 900.0, d=2, draft_leaves=32))
    whole["key"]["emulate"] = {side: {"points": [[1, 8, t]]} for side, t in (("target", 10e-3), ("draft", 5e-3))}
    (tmp_path / "p.json").write_text(json.dumps(whole))
    assert main(["--against", str(tmp_path / "p.json")]) == 0
    assert "async 1+1    predicted   300.0  measured   250.0 (d 2)  +20.0%" in capsys.readouterr().out, "w = 8 as w = 8"


TABLE = {"target": {"1": {"8": 160}, "2": {"8": 100}, "3": {"8": 80}},
         "draft": {"1": {"8": 26}, "2": {"8": 22}, "3": {"8": 20}}}  # fmt: skip
PLANS = [
    {"mode": "ar", "target_tp": 3},
    {"mode": "serial", "target_tp": 3, "draft_tp": 3, "draft_steps": 2},
    {"mode": "async", "target_tp": 2, "draft_tp": 1, "draft_steps": 3},
    {"mode": "async", "target_tp": 1, "draft_tp": 2, "draft_steps": 6},
]


@pytest.mark.slow
def test_no_split_is_faster_than_predicted_or_loses_its_overlap(tmp_path: Path, pool: Pool) -> None:
    """The real runtime on three ranks with emulated step times.

    The prediction has no overheads, so other load on the machine only slows the measurement down. Without the overlap
    of draft and target, the speed of the asynchronous plans would be 0.55 to 0.57 of the prediction.
    """
    file = tmp_path / "table.json"
    file.write_text(json.dumps(TABLE))
    prompt = TextCodec(Path(__file__).parents[3] / "swiftspec" / "demo" / "target").encode("def fibonacci(n):\n")
    found = pool.run(3, "paced", emulate=str(file), plans=PLANS, prompts=[prompt], max_tokens=48)[0]
    given = emulation.parse_emulation(str(file))
    assert given.target is not None and given.draft is not None
    for plan, run_ in zip(PLANS, found, strict=True):
        times = SimulatedTimes(given.target.at(plan["target_tp"], 8), given.draft.at(plan.get("draft_tp", 1), 8))
        rounds = [tuple(round_) for round_ in run_["rounds"]] or [(0, 0)]
        predicted = simulation.run(plan["mode"], rounds, plan.get("draft_steps", 1), times).speed
        assert 0.65 * predicted <= run_["speed"] <= 1.05 * predicted, plan


def test_constants_of_this_cpu() -> None:
    slow, fast = machine.cpu_constants()
    assert 0 < slow.linear.bandwidth < fast.linear.bandwidth and 0 < slow.flops < fast.flops
    assert slow.linear.at(1e6) > fast.linear.at(1e6)
    assert (
        machine.gpu_model("NVIDIA H100 80GB HBM3") is latency_model.GPUS["h100"]
        and machine.gpu_model("RTX 4090") is None
    )
