"""The pairs of the SwiftSpec paper (table 4) by their configurations: pair check, shards, operators and prediction, on
1 to 8 ranks. The weights do not exist here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.prediction import simulation
from bench.prediction.latency_model import GPUS, constants
from bench.prediction.predictor import demo_acceptance, modelled_step_times, predict
from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import cuda
from swiftspec.builder.load_options import LoadOptions, select_operators
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.shard import Shard
from swiftspec.model.vocabulary import Vocabulary

SIZES = range(1, 9)  # tensor-parallel sizes


def config(family: str, vocab: int, layers: int, hidden: int, heads: int, kv: int, inner: int, **more: Any) -> Any:
    """The fields of a published config.json that a spec depends on."""
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "vocab_size": vocab,
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": inner, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2, **more,
    }  # fmt: skip


LINEAR = {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}  # fmt: skip
LLAMA_70B = (128256, 80, 8192, 64, 8, 28672)
CONFIGS = {
    "Llama-3-70B": config("Llama", *LLAMA_70B),
    "Llama-3.2-3B": config("Llama", 128256, 28, 3072, 24, 8, 8192, head_dim=128, tie_word_embeddings=True, **LLAMA3),
    "deepseek-coder-33b": config("Llama", 32256, 62, 7168, 56, 8, 19200, **LINEAR),
    "deepseek-coder-1.3b": config("Llama", 32256, 24, 2048, 16, 16, 5504, **LINEAR),
    "Qwen2-72B": config("Qwen2", 152064, 80, 8192, 64, 8, 29568),
    "Qwen2-1.5B": config("Qwen2", 151936, 28, 1536, 12, 2, 8960, tie_word_embeddings=True),
    "R1-Distill-Qwen-32B": config("Qwen2", 152064, 64, 5120, 40, 8, 27648),
    "R1-Distill-Qwen-1.5B": config("Qwen2", 151936, 28, 1536, 12, 2, 8960),
    "R1-Distill-Llama-70B": config("Llama", *LLAMA_70B, **LLAMA3),
    "R1-Distill-Llama-8B": config("Llama", 128256, 32, 4096, 32, 8, 14336, **LLAMA3),
    "Qwen2.5-0.5B": config("Qwen2", 151936, 24, 896, 14, 2, 4864, tie_word_embeddings=True),
}
PAIRS = [
    ("Llama-3-70B", "Llama-3.2-3B"),
    ("deepseek-coder-33b", "deepseek-coder-1.3b"),
    ("Qwen2-72B", "Qwen2-1.5B"),
    ("R1-Distill-Qwen-32B", "R1-Distill-Qwen-1.5B"),
    ("R1-Distill-Llama-70B", "R1-Distill-Llama-8B"),
    ("Qwen2-72B", "Qwen2.5-0.5B"),
]
HEADERS = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128006: "<|start_header_id|>",
           128007: "<|end_header_id|>", 128009: "<|eot_id|>"}  # fmt: skip


def llama_3_special(named: dict[int, str]) -> dict[int, str]:
    """The 256 special tokens of Llama 3: ids without a name are reserved ones, numbered in their order."""
    known = HEADERS | named
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(256))
    return {i: known[i] if i in known else next(reserved) for i in range(128000, 128256)}


CHAT = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
R1 = {**CHAT, 151643: "<|end_of_sentence|>", 151648: "<think>", 151649: "</think>"}
SPECIAL: dict[str, tuple[int, dict[int, str]]] = {  # number of ordinary tokens, added tokens
    "Llama-3-70B": (128000, llama_3_special({})),
    "Llama-3.2-3B": (
        128000,
        llama_3_special({128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}),
    ),
    "Qwen2-72B": (151643, CHAT),
    "Qwen2-1.5B": (151643, CHAT),
    "Qwen2.5-0.5B": (151643, CHAT | {i: f"<added-{i}>" for i in range(151646, 151665)}),
    "R1-Distill-Qwen-32B": (151643, R1),
    "R1-Distill-Qwen-1.5B": (151643, R1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    for name, values in CONFIGS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(values))
    return path


def vocabulary(name: str, words: dict[int, dict[str, int]]) -> Vocabulary:
    count, added = SPECIAL.get(name, (32022, {}))
    ordinary = words.setdefault(count, {f"t{i}": i for i in range(count)})
    return Vocabulary.of(name, "Toy", ordinary | {token: i for i, token in added.items()}, added)


@pytest.fixture(scope="module")
def words() -> dict[int, dict[str, int]]:
    """Ordinary tokens by their number, which the tokenizers share."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_pair_is_accepted_on_every_split(
    target: str, draft: str, folder: Path, words: dict[int, dict[str, int]]
) -> None:
    ours, theirs = vocabulary(target, words), vocabulary(draft, words)
    ours.check_draft(theirs)
    masked = ours.masked_tokens(theirs, CONFIGS[draft]["vocab_size"])
    if target == "Llama-3-70B":
        assert {128004, 128008, 128010} <= {*masked} and not {*HEADERS} & {*masked}
    else:
        assert masked == ()
    options: LoadOptions = {
        "device": "cpu", "vocab_size": ours.size, "masked_tokens": masked, "max_model_len": 1024, "dtype": "bfloat16",
    }  # fmt: skip
    plans = [EngineConfig("serial", target_tp=size) for size in SIZES]
    plans += [EngineConfig("async", target_tp=size, draft_tp=8 - size) for size in range(1, 8)]
    for plan in plans:
        ranks: Any = SimpleNamespace(size=plan.num_ranks, local_rank=0, local_size=plan.num_ranks)
        pair = Plan.create(folder / target, folder / draft, plan, ranks if plan.num_ranks > 1 else None, options)
        assert (pair.vocab_size, pair.vocabulary.masked_tokens) == (ours.size, masked)
        assert pair.with_vocab(ours.size, masked).vocabulary.masked_tokens == masked


def test_a_pair_of_two_families_is_refused(words: dict[int, dict[str, int]]) -> None:
    with pytest.raises(UserError, match=r"the tokenizers of target Llama-3-70B and draft Qwen2-1\.5B differ") as caught:
        vocabulary("Llama-3-70B", words).check_draft(vocabulary("Qwen2-1.5B", words))
    assert "id 128000 is the added token '<|begin_of_text|>' in the target's, 't128000' in" in str(caught.value)


def covered(parts: Iterable[torch.Tensor], count: int) -> bool:
    """Whether the ranks' rows contain every row of the whole matrix."""
    rows = torch.cat([*parts])
    return torch.equal(rows[rows >= 0].unique(), torch.arange(count))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_cover_the_model(name: str, folder: Path) -> None:
    model = read_config(folder / name)
    mixer, inner = model.spec.layer.attention, model.spec.layer.mlp.intermediate_size
    for size in SIZES:
        shards = [Shard.of(model, rank, size) for rank in range(size)]
        layers = [shard.layers[0] for shard in shards]
        assert len({(layer.num_heads, layer.kv_heads) for layer in layers}) == 1
        assert len({shard.head_rows for shard in shards}) == 1
        assert covered((layer.o for layer in layers), mixer.q_size)
        assert covered((layer.qkv for layer in layers), mixer.q_size + 2 * mixer.kv_size)
        assert covered((layer.down for layer in layers), inner)
        assert covered((layer.gate_up for layer in layers), 2 * inner)
        assert covered((shard.vocab for shard in shards), model.spec.vocab_size)


@pytest.mark.parametrize("name", CONFIGS)
def test_native_operators_fit(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_config(folder / name).spec
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", lambda device: torch.device(device))
    monkeypatch.setattr(cpu, "level", lambda: "avx2")
    for device, wanted in ((torch.device("cuda", 0), cuda), (torch.device("cpu"), cpu)):
        assert select_operators("auto", spec, torch.bfloat16, device) is wanted


@pytest.mark.parametrize(
    ("target", "draft"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS[1:])]
)
def test_the_predictor_covers_every_split(
    target: str, draft: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "NUM_RESAMPLES", 2)  # of the interval of each prediction
    configs = [read_config(folder / name) for name in (target, draft)]
    step_times = modelled_step_times(configs[0], configs[1], constants(GPUS["h800"]), 8, int4=True)
    plain: list[float] = []
    for ranks in SIZES:
        rows = predict(ranks, demo_acceptance(), 8, 8, step_times)
        assert {(row.mode, row.target_tp) for row in rows} == {
            ("ar", ranks), ("serial", ranks), *(("async", x) for x in range(1, ranks)),
        }  # fmt: skip
        assert all(row.low <= row.speed <= row.high for row in rows)
        assert rows[0].mode != "ar", "speculation is faster"
        plain.append(next(row.speed for row in rows if row.mode == "ar"))
    assert plain == sorted(plain), "more GPUs are faster"
