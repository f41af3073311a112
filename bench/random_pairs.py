"""Hybrids and mixtures of experts on a CPU: pairs of random int4 weights in the shapes of Qwen3.5-4B and -0.8B (hybrids
of gated delta layers and attention), or of Qwen3-30B-A3B (a mixture) and Qwen3-0.6B.

    python -m bench.random_pairs [--pair qwen3.5|a3b] [--layers N] [--folder DIR] [--rows 1,2,4,8,16] [--tokens 96]
                                 [--repeats 3] [--threads 2] [--modes ar,serial]
                                 [--llama-bin DIR] [--drafts 2,4]

Writes both checkpoints (4 GB, of a3b 17 GB; kept in --folder), and prints the price of rows of each model, the speed of
prompts, and the speed of autoregressive and of serial decoding, which alternate. --layers: of the target, all by
default. --modes: one of the two for a pair that does not fit into the memory twice. With --llama-bin, `llama-server`
from that folder then runs the same weights of qwen3.5 (bench/baselines/hybrid_gguf.py; 6.5 GB more, written within
minutes): plain, and with the draft, for each number of drafted tokens per round in --drafts. All systems sample from
the models' distributions.

The weights are random, but the pair agrees often: embedding and LM head are tied and the layers add little to the
residual stream, so both models repeat the last token with a probability of about --share, and draw any other token
otherwise. The tokens per round in the table follow from that and not from the shapes, unlike the prices of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.baselines.llama_server import UNCHANGED, LlamaServer, find_server
from bench.width_expanded import complete, warm
from bench.workload import Measured, Work
from swiftspec.backends.cpu import cpu as host
from swiftspec.builder.load_options import Side
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner

GROUP, CONTEXT, PROMPT = 128, 64, 512
KINDS = ("q4_1", "q4_0")  # weight types of llama.cpp's files
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "head_dim": 256, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
PAIRS: dict[str, dict[str, dict[str, Any]]] = {  # fields of config.json, by pair and model: target, draft
    "qwen3.5": {
        "4B": HYBRID | {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        "0.8B": HYBRID | {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        },
    },
    "a3b": {
        "30B-A3B": QWEN3 | {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True,
        },
        "0.6B": QWEN3 | {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    },
}  # fmt: skip
# matrices that quantised checkpoints leave dense; "mlp.gate" is a router
DENSE = ("in_proj_a", "in_proj_b", "embed_tokens", "mlp.gate")
NORMS_PLUS_ONE = ("qwen3_5_text",)  # families whose norms multiply by 1 + weight
LAYER_SCALE = 0.3  # standard deviation of a projection's output


def int4_tensors(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Returns a random matrix in AutoAWQ's format, with the codes 1 to 15 around the zero point 8, so that its mean is
    0."""
    scale = LAYER_SCALE * inputs**-0.5 / 4.2  # the standard deviation of the codes
    codes = torch.randint(-(2**31), 2**31 - 1, (inputs, outputs // 8), dtype=torch.int32)
    used = (codes | codes >> 1 | codes >> 2 | codes >> 3) & 0x11111111  # of each code one bit: whether it is not 0
    return {
        f"{name}.qweight": codes | (used ^ 0x11111111) << 3,
        f"{name}.qzeros": torch.full((inputs // GROUP, outputs // 8), -0x77777778, dtype=torch.int32),  # eights
        f"{name}.scales": torch.full((inputs // GROUP, outputs), scale, dtype=torch.float16),
    }


def write_checkpoint(folder: Path, fields: dict[str, Any], share: float) -> None:
    """Writes a random model whose next token equals the last one with a probability of about `share`, in a file for
    each layer and one for the rest."""
    common: dict[str, Any] = {
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(**fields | common)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    shapes, places = defaultdict[str, dict[str, torch.Size]](dict), dict[str, str]()
    for name, weight in model.named_parameters():
        words = name.split(".")
        shapes[f"layer-{words[2]}" if words[1] == "layers" else "rest"][name] = weight.shape
    for part, named in shapes.items():
        tensors = dict[str, Tensor]()
        for name, shape in named.items():
            tensors |= random_tensors(name, shape, config, share)
        save_file(tensors, folder / f"{part}.safetensors")
        places |= dict.fromkeys(tensors, f"{part}.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    written = {"architectures": [type(model).__name__], "quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **written}))


def random_tensors(name: str, shape: torch.Size, config: Any, share: float) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint for one of the model's parameters."""
    module, one = name.removesuffix(".weight"), 0.0 if config.model_type in NORMS_PLUS_ONE else 1.0
    if len(shape) == 3 and "experts" in name:
        return expert_tensors(name, *shape)
    if len(shape) == 2 and not module.endswith(DENSE):
        return int4_tensors(module, *shape)
    if name == "model.norm.weight":  # scales the logits
        logit = math.log(share / (1 - share) * config.vocab_size)
        return {name: torch.full(shape, logit / config.hidden_size + one - 1)}
    if "norm" in name:
        return {name: torch.full(shape, 1.0 if "linear_attn" in name else one)}
    if name.endswith("A_log"):
        return {name: torch.rand(shape).mul(16).log()}
    spread = 1.0 if "embed" in name else LAYER_SCALE
    return {name: spread * torch.randn(shape).to(torch.bfloat16)}


def expert_tensors(name: str, count: int, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Returns random matrices of all experts of a layer. `name`: of the parameter with those of all."""
    prefix, _, kind = name.rpartition(".")
    modules = {"down_proj": outputs}
    if kind == "gate_up_proj":
        modules = dict.fromkeys(("gate_proj", "up_proj"), outputs // 2)
    tensors = dict[str, Tensor]()
    for expert in range(count):
        for module, rows in modules.items():
            tensors |= int4_tensors(f"{prefix}.{expert}.{module}", rows, inputs)
    return tensors


def chain(rows: int, first: int, vocab: int) -> Batch:
    """Returns a batch of random tokens after `first` others."""
    places = torch.arange(first, first + rows)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    return Batch(torch.randint(0, vocab, (rows,)), places, places, mask, 0 * places, torch.tensor([first + rows]))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def row_prices(runner: Runner, rows: list[int], repeats: int) -> dict[int, float]:
    """Returns the least milliseconds of a forward, by number of rows."""
    runner.open(torch.randint(0, runner.vocab, (CONTEXT + 1,)).tolist())
    found = defaultdict[int, list[float]](list)
    for _ in range(repeats):
        for count in rows:
            batch = chain(count, CONTEXT, runner.vocab)
            found[count].append(1000 * seconds(lambda batch=batch: runner.model.forward(batch, runner.cache)))
    return {count: min(times) for count, times in found.items()}


def prompt_speed(runner: Runner) -> float:
    """Returns the tokens per second of a prompt of PROMPT tokens."""
    prompt = torch.randint(0, runner.vocab, (PROMPT + 1,)).tolist()
    return PROMPT / seconds(lambda: runner.open(prompt))


def runners(llm: LLMEngine) -> Iterator[tuple[Side, Runner]]:
    """Yields the runners of a serial engine."""
    roles: Any = llm.roles.inner_roles
    yield "target", roles.verifier.runner
    yield "draft", roles.drafter.runner


def report_rows(llm: LLMEngine, names: Iterable[str], rows: list[int], repeats: int) -> None:
    print(f"| forward, ms | {' | '.join(map(str, rows))} | prompt tok/s |")
    print(f"|---|{'---|' * (len(rows) + 1)}")
    for (side, runner), shape in zip(runners(llm), names, strict=True):
        prices, speed = row_prices(runner, rows, repeats), max(prompt_speed(runner) for _ in range(2))
        cells = [f"{prices[count]:.1f} ({prices[count] / prices[rows[0]]:.2f})" for count in rows]
        print(f"| {shape} ({side}) | {' | '.join(cells)} | {speed:.0f} |")


def report_speed(engines: dict[str, LLMEngine], vocab: int, tokens: int, repeats: int) -> None:
    found, lengths = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for turn in range(repeats):
        prompt = torch.randint(0, vocab, (CONTEXT,)).tolist()
        for name, llm in engines.items():
            answer = llm.generate(prompt, SamplingParams(temperature=1.0, seed=turn, max_tokens=tokens))
            found[name].append(answer.stats.tokens / answer.stats.decode_time)
            lengths[name].append(answer.stats.tokens / answer.stats.rounds)
    print("\n| mode | tok/s | tokens per round |\n|---|---|---|")
    for name in engines:
        print(f"| {name} | {statistics.median(found[name]):.2f} | {statistics.median(lengths[name]):.2f} |")


def report_ours(paths: list[Path], args: argparse.Namespace) -> None:
    target, draft = paths
    packed = target.parent / "packed"
    options: dict[str, Any] = {"max_model_len": 2048, "threads": args.threads, "packed_cache": packed}
    engines = dict[str, LLMEngine]()
    if "serial" in args.modes:
        engines["serial"] = LLMEngine(target, draft, EngineConfig("serial"), **options)
    if "ar" in args.modes:
        engines["ar"] = LLMEngine(target, **options)
    print(f"ISA level {host.level()}, {host.threads()} threads\n")
    pair = PAIRS[args.pair]
    vocab = min(fields["vocab_size"] for fields in pair.values())
    if "serial" in engines:
        report_rows(engines["serial"], pair, args.rows, args.repeats)
    report_speed(engines, vocab, args.tokens, args.repeats)


def gguf_file(checkpoint: Path, kind: str) -> Path:
    """Returns llama.cpp's file of a checkpoint, which is written unless it exists."""
    file = checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if not file.is_file():
        from bench.baselines.hybrid_gguf import write_gguf  # needs the package gguf

        with complete(file) as out:
            write_gguf(checkpoint, out, kind)
    return file


def report_peer(server: LlamaServer, paths: list[Path], args: argparse.Namespace) -> None:
    """Prints the speed of llama.cpp: of each model, and of the target with the draft."""
    pair, vocab = PAIRS[args.pair], HYBRID["vocab_size"]
    long, short = (torch.randint(0, vocab, (args.repeats, size)).tolist() for size in (PROMPT, CONTEXT))
    work = Work(long, short, args.tokens)
    print(f"\nllama.cpp {server.version}\n\n| mode | tok/s | tokens per round | prompt tok/s |\n|---|---|---|---|")
    for kind in KINDS:
        target, draft = files = [gguf_file(path, kind) for path in paths]
        warm(files)
        for shape, file in zip(pair, files, strict=True):
            found = server.measure(work, file, args.threads, sampling=UNCHANGED)
            print(peer_row(f"{shape} {kind}, plain", found))
        for count in args.drafts:
            found = server.measure(work, target, args.threads, (draft, count), UNCHANGED)
            print(peer_row(f"{' and '.join(pair)} {kind}, draft of {count}", found))


def peer_row(name: str, found: Measured) -> str:
    speed, prompt = statistics.median(found.rates), max(found.prompts)
    return f"| {name} | {speed:.2f} | {found.decoded / found.rounds:.2f} | {prompt:.0f} |"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="qwen3.5")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--modes", type=lambda words: words.split(","), default=["ar", "serial"])
    for name, value in {"tokens": 96, "repeats": 3, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server (default: without llama.cpp)")
    parser.add_argument("--drafts", type=numbers, default=[2, 4], help="draft tokens per round of llama.cpp")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    server = None if args.llama_bin is None else find_server(args.llama_bin)
    if args.llama_bin is not None and args.pair != "qwen3.5":
        sys.exit("bench.random_pairs: llama.cpp runs the pair qwen3.5 only")
    if args.llama_bin is not None and server is None:
        sys.exit(f"bench.random_pairs: {args.llama_bin} does not contain llama-server")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        models = dict(PAIRS[args.pair])
        if args.layers is not None:
            first = next(iter(models))
            models[first] = models[first] | {"num_hidden_layers": args.layers}
        paths = [folder / name for name in models]
        for path, fields in zip(paths, models.values(), strict=True):
            if not (path / "config.json").exists():
                write_checkpoint(path, fields, args.share)
        report_ours(paths, args)
        if server is not None:
            try:
                report_peer(server, paths, args)
            except UserError as error:
                sys.exit(f"bench.random_pairs: {error}")


if __name__ == "__main__":
    main()
