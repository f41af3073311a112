"""Hybrids of gated delta layers and attention on a CPU: random int4 weights in the shapes of Qwen3.5-4B and -0.8B.

    python -m bench.hybrid [--folder DIR] [--rows 1,2,4,8,16] [--tokens 96] [--repeats 3] [--threads 2]
                           [--llama-bin DIR] [--drafts 2,4]

Writes both checkpoints (5 GB; kept in --folder), and prints the price of rows of each model, the speed of prompts, and
the speed of autoregressive and of serial decoding, which alternate. With --llama-bin, `llama-server` from that folder
then runs the same weights (bench/baselines/hybrid_gguf.py; 6.5 GB more, written within minutes): plain, and with the
draft, for each number of drafted tokens per round in --drafts. All systems sample from the models' distributions.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.baselines.llama_server import UNCHANGED, LlamaServer, find_server
from bench.width_expanded import complete, warm
from bench.workload import Measured, Work
from swiftspec.backends import cpu as host
from swiftspec.builder.load_options import Side
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm import LLM
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner

VOCAB, GROUP, CONTEXT, PROMPT = 248_320, 128, 64, 512
KINDS = ("q4_1", "q4_0")  # weight types of llama.cpp's files
SHAPES: dict[str, dict[str, int]] = {
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
    "0.8B": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    },
}  # fmt: skip
DENSE = ("in_proj_a", "in_proj_b", "embed_tokens")  # matrices that quantised checkpoints leave dense
LAYER_SCALE = 0.3  # standard deviation of a projection's output


def int4_tensors(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Returns a random matrix in AutoAWQ's format."""
    scale = LAYER_SCALE * inputs**-0.5 / 4.6  # the standard deviation of the codes 0..15
    return {
        f"{name}.qweight": torch.randint(-(2**31), 2**31 - 1, (inputs, outputs // 8), dtype=torch.int32),
        f"{name}.qzeros": torch.full((inputs // GROUP, outputs // 8), -0x77777778, dtype=torch.int32),  # eights
        f"{name}.scales": torch.full((inputs // GROUP, outputs), scale, dtype=torch.float16),
    }


def write_checkpoint(folder: Path, shape: str, share: float) -> None:
    """Writes a random model whose next token equals the last one with a probability of about `share`."""
    fields: dict[str, Any] = {
        **SHAPES[shape], "vocab_size": VOCAB, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_5_text", **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = dict[str, Tensor]()
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and not module.endswith(DENSE):
            tensors |= int4_tensors(module, *weight.shape)
        elif name == "model.norm.weight":  # scales the logits: 1 + weight is the factor
            logit = math.log(share / (1 - share) * VOCAB)
            tensors[name] = torch.full(weight.shape, logit / config.hidden_size - 1)
        elif "norm" in name:
            tensors[name] = torch.full(weight.shape, 1.0 if "linear_attn" in name else 0.0)
        elif name.endswith("A_log"):
            tensors[name] = torch.rand(weight.shape).mul(16).log()
        else:
            spread = 1.0 if "embed" in name else LAYER_SCALE
            tensors[name] = spread * torch.randn(weight.shape).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / "model.safetensors")
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    written = {"architectures": ["Qwen3_5ForCausalLM"], "quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **written}))


def chain(rows: int, first: int) -> Batch:
    """Returns a batch of random tokens after `first` others."""
    places = torch.arange(first, first + rows)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    return Batch(torch.randint(0, VOCAB, (rows,)), places, places, mask, 0 * places, torch.tensor([first + rows]))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def row_prices(runner: Runner, rows: list[int], repeats: int) -> dict[int, float]:
    """Returns the least milliseconds of a forward, by number of rows."""
    runner.open(torch.randint(0, VOCAB, (CONTEXT + 1,)).tolist())
    found = defaultdict[int, list[float]](list)
    for _ in range(repeats):
        for count in rows:
            batch = chain(count, CONTEXT)
            found[count].append(1000 * seconds(lambda batch=batch: runner.model.forward(batch, runner.cache)))
    return {count: min(times) for count, times in found.items()}


def prompt_speed(runner: Runner) -> float:
    """Returns the tokens per second of a prompt of PROMPT tokens."""
    prompt = torch.randint(0, VOCAB, (PROMPT + 1,)).tolist()
    return PROMPT / seconds(lambda: runner.open(prompt))


def runners(llm: LLM) -> Iterator[tuple[Side, Runner]]:
    """Yields the runners of a serial engine."""
    roles: Any = llm.roles.inner_roles
    yield "target", roles.verifier.runner
    yield "draft", roles.drafter.runner


def report_rows(llm: LLM, rows: list[int], repeats: int) -> None:
    print(f"| forward, ms | {' | '.join(map(str, rows))} | prompt tok/s |")
    print(f"|---|{'---|' * (len(rows) + 1)}")
    for (side, runner), shape in zip(runners(llm), SHAPES, strict=True):
        prices, speed = row_prices(runner, rows, repeats), max(prompt_speed(runner) for _ in range(2))
        cells = [f"{prices[count]:.1f} ({prices[count] / prices[rows[0]]:.2f})" for count in rows]
        print(f"| {shape} ({side}) | {' | '.join(cells)} | {speed:.0f} |")


def report_speed(engines: dict[str, LLM], tokens: int, repeats: int) -> None:
    found, lengths = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for turn in range(repeats):
        prompt = torch.randint(0, VOCAB, (CONTEXT,)).tolist()
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
    serial = LLM(target, draft, EngineConfig("serial"), **options)
    print(f"ISA level {host.level()}, {host.threads()} threads\n")
    report_rows(serial, args.rows, args.repeats)
    report_speed({"ar": LLM(target, **options), "serial": serial}, args.tokens, args.repeats)


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
    long, short = (torch.randint(0, VOCAB, (args.repeats, size)).tolist() for size in (PROMPT, CONTEXT))
    work = Work(long, short, args.tokens)
    print(f"\nllama.cpp {server.version}\n\n| mode | tok/s | tokens per round | prompt tok/s |\n|---|---|---|---|")
    for kind in KINDS:
        target, draft = files = [gguf_file(path, kind) for path in paths]
        warm(files)
        for shape, file in zip(SHAPES, files, strict=True):
            found = server.measure(work, file, args.threads, sampling=UNCHANGED)
            print(peer_row(f"{shape} {kind}, plain", found))
        for count in args.drafts:
            found = server.measure(work, target, args.threads, (draft, count), UNCHANGED)
            print(peer_row(f"{' and '.join(SHAPES)} {kind}, draft of {count}", found))


def peer_row(name: str, found: Measured) -> str:
    speed, prompt = statistics.median(found.rates), max(found.prompts)
    return f"| {name} | {speed:.2f} | {found.decoded / found.rounds:.2f} | {prompt:.0f} |"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--share", type=float, default=0.75)
    for name, value in {"tokens": 96, "repeats": 3, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server (default: without llama.cpp)")
    parser.add_argument("--drafts", type=numbers, default=[2, 4], help="draft tokens per round of llama.cpp")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    server = None if args.llama_bin is None else find_server(args.llama_bin)
    if args.llama_bin is not None and server is None:
        sys.exit(f"bench.hybrid: {args.llama_bin} does not contain llama-server")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        paths = [folder / shape for shape in SHAPES]
        for path, shape in zip(paths, SHAPES, strict=True):
            if not (path / "config.json").exists():
                write_checkpoint(path, shape, args.share)
        report_ours(paths, args)
        if server is not None:
            try:
                report_peer(server, paths, args)
            except UserError as error:
                sys.exit(f"bench.hybrid: {error}")


if __name__ == "__main__":
    main()
