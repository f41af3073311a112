"""Files from untrusted sources: models, profiles, traces, settings."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from bench import timeline
from bench.prediction import latency_model
from bench.prediction.simulation import RecordedAcceptance
from swiftspec.backends.reference import reference
from swiftspec.cli import config_sources
from swiftspec.config import EngineConfig
from swiftspec.lab import results, round_costs
from swiftspec.lab.profile import read_prompts
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.fingerprint import fingerprint
from swiftspec.model.gguf.config import extra_layers, gguf_config
from swiftspec.model.gguf.file import GgufFile, GgufStrings
from swiftspec.model.gguf.tokenizer import end_token_ids, has_vocabulary, tokenizer_json, tokenizer_settings
from swiftspec.params import SamplingParams
from swiftspec.profiles import emulation, store
from swiftspec.settings.settings import Settings
from swiftspec.startup.model_resolution import generation_defaults
from swiftspec.text.codec import TextCodec
from tests.support.fuzz import Target
from tests.support.fuzz.json_text import SCALARS, damaged, mutated, texts, written
from tests.support.gguf_files import write_gguf
from tests.support.profiles import KEY, profile, run
from tests.support.tiny_checkpoints import LONGROPE, make_model
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 48, "hidden_size": 16, "head_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "torch_dtype": "float32", "bos_token_id": 1,
    "eos_token_id": [2, 3], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "layer_types": None,
    "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = [CONFIG, CONFIG | {"rope_scaling": {"rope_type": "llama3", **ROPE}}, CONFIG | {
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}]  # fmt: skip
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None,
        "dynamic": False}}}, "sparsity_config": {"format": "dense"},
}  # fmt: skip


def _of(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


AWQ = "tests/data/awq_gemm_tiny"
QUANTISED = [_of(f"{AWQ}/config.json"), _of("swiftspec/demo/target/config.json"), CONFIG | {
    "quantization_config": PACKED}]  # fmt: skip
GENERATION = {
    "bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50.0,
    "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 20,
}  # fmt: skip


@functools.cache
def weights() -> Path:
    """A file of random weights that fits CONFIG."""
    sizes = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,), "post_attention_layernorm": (16,),
    }  # fmt: skip
    named = {f"model.layers.0.{name}.weight": size for name, size in sizes.items()}
    named |= {"model.embed_tokens.weight": (48, 16), "model.norm.weight": (16,)}
    draw = torch.Generator().manual_seed(0)
    file = Path(tempfile.mkdtemp()) / "model.safetensors"
    save_file({name: torch.rand(size, generator=draw) - 0.5 for name, size in named.items()}, file)
    return file


def decode(folder: Path) -> None:
    """Loads a model and generates four tokens."""
    config = read_config(folder)
    fingerprint(folder)
    llm = LLMEngine(
        folder, None, EngineConfig("ar"), max_model_len=min(64, config.max_position_embeddings), ops="reference"
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert 1 <= len(llm.generate([1], sampling).token_ids) <= 4
    llm.close()


def _config(text: bytes, folder: Path, model: Path | None = None) -> None:
    (folder / "config.json").write_bytes(text)
    (folder / "model.safetensors").symlink_to(weights() if model is None else model)
    decode(folder)


def _quantised(text: bytes, folder: Path) -> None:
    _config(text, folder, ROOT / AWQ / "model.safetensors")


def _generation(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(written(CONFIG))
    (folder / "generation_config.json").write_bytes(text)
    read_config(folder)
    Settings().sampling_params(generation_defaults(folder))


@functools.cache
def _parts() -> tuple[dict[str, Any], bytes]:
    """Header and data of the weights."""
    data = weights().read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    """The weights file with a damaged header, whose length is mostly correct, or with a valid header that does not
    match the data."""
    header, data = _parts()
    lies = dict(header)
    for name in draw(st.lists(st.sampled_from([name for name in header if name != "__metadata__"]), max_size=2)):
        one = lies.pop(name, header[name])
        change = draw(st.sampled_from([{"dtype": "I32"}, {"shape": [*one["shape"], 1]}, {"shape": one["shape"][::-1]}]))
        lies[draw(st.sampled_from([name, "a\nb", "x" * 3000]))] = one | change
    text = written(draw(st.just(lies) | mutated(header)))
    wrong = [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]
    length = len(text) if draw(st.integers(0, 4)) else draw(st.sampled_from(wrong))
    return length.to_bytes(8, "little") + text + data[: draw(st.sampled_from([len(data), len(data), len(data) - 1, 0]))]


def _safetensors(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(written(CONFIG))
    (folder / "model.safetensors").write_bytes(data)
    decode(folder)


GGUF_FAMILIES = {
    "llama": {}, "gemma3_text": {}, "phi3": {"rope": LONGROPE | {"attention_factor": 1.5}}, "ministral3": {},
    "qwen3_5_text": {"layer_types": ["full_attention"]}, "qwen3": {"hidden_size": 256, "intermediate_size": 256},
}  # fmt: skip
GGUF_TYPES = {"qwen3": ("Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_NL", "Q8_0", "F32")}  # of its matrices, in turn


@functools.cache
def _gguf(family: str) -> tuple[bytes, int]:
    """A GGUF file of a small model, and the length of its header."""
    file = Path(tempfile.mkdtemp()) / "model.gguf"
    small = {"layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    model, types = make_model(family=family, **(small | GGUF_FAMILIES[family])), cycle(GGUF_TYPES.get(family, ["Q4_0"]))
    write_gguf(file, model, lambda name: next(types))
    return file.read_bytes(), min(tensor.offset for tensor in GgufFile.read(file).tensors.values())


EXTREMES = [0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """A GGUF file in whose header some numbers, lengths and bytes differ, or that is cut."""
    whole, header = _gguf(draw(st.sampled_from([*GGUF_FAMILIES])))
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.integers(0, header - 8)), draw(st.sampled_from([1, 4, 8]))
        value = draw(st.sampled_from(EXTREMES) | st.integers(0, 2**64 - 1)) % 2 ** (8 * size)
        data[at : at + size] = value.to_bytes(size, "little")
    for key in draw(st.lists(st.sampled_from(GGUF_KEYS), max_size=2)):  # the value of an entry, or its type before it
        start = data.find(key) + len(key)
        if start >= len(key):
            value = draw(st.sampled_from(EXTREMES))
            at, size = draw(st.sampled_from([(start, 4), (start + 4, 4), (start + 4, 8), (start + 8, 8)]))
            data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    cut = draw(st.sampled_from([len(data), len(data), len(data), len(data) - 1, header, header // 2, 4, 0]))
    return bytes(data[:cut])


GGUF_KEYS = [
    b"general.architecture", b".block_count", b".context_length", b".embedding_length", b".feed_forward_length",
    b".attention.head_count", b".attention.key_length", b".rope.freq_base", b".attention.layer_norm_rms_epsilon",
    b".rope.dimension_count", b".attention.sliding_window", b".attention.sliding_window_pattern",
    b".final_logit_softcapping", b".rope.freq_base_swa", b".rope.scaling.type", b".rope.scaling.factor",
    b".rope.scaling.original_context_length", b".rope.scaling.attn_factor", b".rope.scaling.yarn_beta_fast",
    b".rope.scaling.yarn_log_multiplier", b".attention.temperature_scale", b".nextn_predict_layers",
    b"rope_factors_long.weight",
    b"tokenizer.ggml.model", b"tokenizer.ggml.pre", b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type",
    b"tokenizer.ggml.merges", b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id", b"token_embd.weight",
    b"blk.0.attn_q.weight", b"blk.0.ffn_up.weight", b"blk.0.ffn_down.weight", b"output_norm.weight",
]  # fmt: skip


VALUES: list[Any] = [
    np.arange(3, dtype=np.int32), np.ones(0, np.float32), np.full(70, 2**63 - 1, np.uint64), 1.0, 0.0, -1, 0, 1, 2**40,
    2**63 - 1, math.inf, math.nan, 5e-324, 3.5, "x", "", True, GgufStrings(b"", 0),
    GgufStrings(b"\1" + bytes(7) + b"a", 1),
]  # fmt: skip
ADDED_KEYS = [
    "ARCH.rope.scaling.type", "ARCH.rope.scaling.factor", "ARCH.nextn_predict_layers", "ARCH.rope.dimension_count",
    "ARCH.attention.key_length", "ARCH.rope.scaling.original_context_length", "ARCH.rope.dimension_sections",
    "tokenizer.ggml.token_type", "tokenizer.ggml.scores",
]  # fmt: skip


@st.composite
def gguf_metadata(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A family, and values of any type for some entries of the metadata."""
    family = draw(st.sampled_from([*GGUF_FAMILIES]))
    metadata = _gguf_header(family).metadata
    added = [key.replace("ARCH", metadata["general.architecture"]) for key in ADDED_KEYS]
    keys = st.sampled_from(sorted({*metadata, *added}))
    return family, draw(st.dictionaries(keys, st.sampled_from(VALUES), min_size=1, max_size=3))


@functools.cache
def _gguf_header(family: str) -> GgufFile:
    file = Path(tempfile.mkdtemp()) / "model.gguf"
    file.write_bytes(_gguf(family)[0])
    return GgufFile.read(file)


def _gguf_metadata(given: tuple[str, dict[str, Any]], folder: Path) -> None:
    family, changes = given
    header = _gguf_header(family)
    file = GgufFile(header.path, {**header.metadata, **changes}, header.tensors)
    for mixer in gguf_config(file).spec.attention_mixers:
        reference.rope_tables(mixer.rope, mixer.head_dim, 8, torch.float32, "cpu")
    extra_layers(file, 1)
    end_token_ids(file)
    if has_vocabulary(file):
        tokenizer_json(file)
        tokenizer_settings(file)


@functools.cache
def _tokenizer() -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a small tokenizer."""
    folder = write_tokenizer(Path(tempfile.mkdtemp()), byte_level_tokenizer())
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"] |= {"merges": data["model"]["merges"][:3]}
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return data, settings | {"model_max_length": 100, "clean_up_tokenization_spaces": False}


NORMALIZERS = [{"type": "Precompiled", "precompiled_charsmap": text} for text in ("AAAA", "/////w==", "", "AAAAAA==")]


@st.composite
def tokenizers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Both files of a tokenizer, one of which is damaged."""
    data, settings = _tokenizer()
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return written(data), draw(texts(settings))
    if kind == 1:
        return written(data | {"normalizer": draw(st.sampled_from(NORMALIZERS))}), written(settings)
    return draw(texts(data)), written(settings)


def _tokenizer_files(given: tuple[bytes, bytes], folder: Path) -> None:
    for name, text in zip(("tokenizer.json", "tokenizer_config.json"), given, strict=True):
        (folder / name).write_bytes(text)
    TextCodec(folder).encode("AB")


def _gguf_model(data: bytes, folder: Path) -> None:
    file = folder / "model.gguf"
    file.write_bytes(data)
    decode(file)
    TextCodec(file).encode("AB")


def _index(text: bytes, folder: Path) -> None:
    (folder / "a.safetensors").symlink_to(weights())
    (folder / "model.safetensors.index.json").write_bytes(text)
    open_tensors(folder).take("model.norm.weight", 16)


TIMELINE = {
    "request": 0, "round": 1, "wait": [0.0, 0.1], "target": {"verify": [0.1, 1.0], "forward": 0.5, "open": [0.0, 0.1]},
    "proposal": {"tokens": [1, 2], "parents": [-1, 0]}, "path": [0, 1], "tokens": [2, 5], "draft": {
        "observe": [1.0, 1.1], "propose": [1.1, 1.2], "grow": [0.2, 0.9], "forwards": [[0.2, 0.6, 8]], "nodes": 3,
        "expanded": 2, "reused": 1, "wasted": 0},
}  # fmt: skip
HEAD = {
    "swiftspec_trace": 1, "mode": "async", "target_tp": 3, "draft_tp": 1, "verify_batch": 8, "draft_leaves": 8,
    "draft_steps": 3, "model": "m", "emulate": {"target": None, "draft": None},
}  # fmt: skip
PARTICLES = {
    "request": 0, "round": 3, "population": [2.0, 3.0], "tokens": [1, 2], "target": {"forwards": [[2.0, 2.5, 8]]},
    "draft": {"forwards": [[2.5, 2.9, 8]]},
}  # fmt: skip
TRACE = [HEAD, TIMELINE, TIMELINE | {"round": 2}, TIMELINE | {"round": 3}]
PROFILE = profile(
    run("async", 3, 1, 300, 500, d=4), run("serial", 4, 4, 100, d=2, ops="reference"), run("ar", 4, 0, 90.0),
    run("async", 2, 2, dropped="too slow"), run("async", 3, 1, 310, d=4, verify_batch=16, variation=True),
    lanes=[TIMELINE], steps=[{"side": "target", "tp": 1, "rows": 8, "seconds": [0.5, 1]}],
    rounds=[{"plan": {"mode": "serial", "verify_batch": 8, "draft_leaves": 8, "draft_steps": 1}, "rounds": [[1, 1]]}],
    around={"verify": 0.1, "link": 0.2}, orchestration={"seconds": 0.1, "share": 0.5},
    key=KEY | {"emulate": {"target": {"points": [[1, 8, 0.01]]}, "draft": None}},
)  # fmt: skip


def _profile(text: bytes, folder: Path) -> None:
    file = folder / "x.json"
    file.write_bytes(text)
    store.find(folder, store.ProfileKey(**KEY))  # never an error
    found = store.load(file)
    results.format_profile(found)
    results.as_csv(found)
    store.ProfileKey(**KEY).difference(found["key"])
    RecordedAcceptance(found["rounds"])
    best = store.best_run(found)
    if best is not None:
        (folder / "best.yaml").write_text(results.as_yaml(best, "x"))
        config_sources.load_settings({}, folder / "best.yaml").make_plan(
            has_draft=True, ranks=store.ranks_of(best["plan"])
        )


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """Lines, one of which is damaged."""
    base = draw(st.sampled_from([TRACE, [*TRACE, PARTICLES], [HEAD], [HEAD | {"mode": "smc"}, PARTICLES, PARTICLES]]))
    lines = [written(line) for line in base]
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(texts(base[at]))
    return b"\n".join(lines) + draw(st.sampled_from([b"\n", b"", b"\n{"]))


def _trace(data: bytes, folder: Path) -> None:
    (folder / "t.jsonl").write_bytes(data)
    found = round_costs.Trace.read(folder / "t.jsonl")
    json.dumps(timeline.to_chrome_trace(found), allow_nan=False)
    timeline.summary(found)


TABLE = {"target": {"1": {"1": 10.0, "8": 12}, "2": {"8": 6}}, "draft": {"1": {"8": 3.0}}}
SPECS = [
    "target=10ms,draft=3ms", "target=llama3-70b", "target=", "=", "target=1.2.3s", "target=9e-400s", "x" * 5000,
    "draft=" + "9" * 5000 + "s", "target=1ms,target=1ms", "~nobody.json", "\0.json", "/.json", "target=\ud8001ms",
]  # fmt: skip


def _emulation(text: bytes | str, folder: Path) -> None:
    (folder / "e.json").write_bytes(text if isinstance(text, bytes) else b"")
    times = emulation.parse_emulation(text if isinstance(text, str) else str(folder / "e.json"))
    for side in (times.target, times.draft):
        assert side is None or all(side.at(tp, rows) > 0 for tp in (1, 3, 64) for rows in (1, 7, 4096))


POINTS = {"points": [{"op": op, "bytes": 1e6 * n, "us": 3.0 + n} for op in ("linear", "attention") for n in (1, 2, 3)]}


def _kernels(text: bytes, folder: Path) -> None:
    (folder / "k.json").write_bytes(text)
    latency_model.fitted(folder / "k.json", latency_model.GPUS["h200"])


def _prompts(text: bytes, folder: Path) -> None:
    (folder / "p.jsonl").write_bytes(text)
    read_prompts(folder / "p.jsonl", "a")


WORDS = [
    "yes", "1:30", "010", "0x10", "1_000", ".5", ".inf", ".nan", "~", "", "null", "'null'", "''", "2001-01-01", "<<",
    "[1, 2]", "[a, [b]]", "{5: -1}", "{5: -1, 5: 2}", "'{\"5\": 1}'", "&a 1", "*a", "!!int 5", "|\n  x", "serial",
    "!!python/name:os.system x", "[" * 3000, "{a: " * 50, "9" * 5000, "-1", "1e999", "\"\\ud800\"", "- a", "? x",
    "{{x: 1}: 2}", "%x", "@x", "x\t: y", "'a\n  b'", "0.5", "3", "nan", "async",
]  # fmt: skip


@st.composite
def yaml_texts(draw: st.DrawFn) -> bytes:
    """Lines of settings."""
    keys = [*Settings.model_fields, "top-p", "top-k", "<<", "nonsense", "x" * 3000, "? a", "true", "5", "prompt"]
    lines = draw(st.lists(st.tuples(st.sampled_from(keys), st.sampled_from(WORDS)), max_size=3))
    start = draw(st.sampled_from(["", "", "", "---\n", "%YAML 9.9\n---\n", "- ", "&a ", "--- 1\n---\n"]))
    return (start + "\n".join(f"{key}: {word}" for key, word in lines)).encode("utf-8", "surrogatepass")


def _settings(text: bytes, folder: Path) -> None:
    (folder / "s.yaml").write_bytes(text)
    settings = config_sources.load_settings({}, folder / "s.yaml")
    settings.make_plan(has_draft=True)
    settings.sampling_params({})


def _flags(given: list[tuple[str, str]], folder: Path) -> None:
    config_sources.load_settings(dict(given)).make_plan(has_draft=True)


GIVEN = [*map(str, SCALARS[:16]), *map(str, SCALARS[18:]), "9" * 5000, "[" * 5000, '{"5": 1e999}', '{"a": 1}', "5"]
FLAGS = st.lists(st.tuples(st.sampled_from(list(Settings.model_fields)), st.sampled_from(GIVEN)), max_size=3)

TARGETS = [
    Target("config.json", texts(*CONFIGS), _config),
    Target("quantised config.json", texts(*QUANTISED), _quantised),
    Target("generation_config.json", texts(GENERATION), _generation),
    Target("safetensors header", safetensors(), _safetensors),
    Target("GGUF", gguf_files(), _gguf_model, cost=2),
    Target("GGUF metadata", gguf_metadata(), _gguf_metadata, cost=2),
    Target("tokenizer", tokenizers(), _tokenizer_files, cost=2),
    Target("safetensors index", texts({"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors"}}), _index),
    Target("profile", texts(PROFILE), _profile),
    Target("trace", traces(), _trace),
    Target("emulated step times", texts(TABLE) | st.sampled_from(SPECS), _emulation),
    Target("measured operators", texts(POINTS), _kernels),
    Target("prompts", texts({"prompt": "a", "family": "a"}), _prompts),
    Target("settings in YAML", damaged(yaml_texts()), _settings),
    Target("settings as flags", FLAGS, _flags),
]
