"""Decoding speed on the same pair, prompts and length: transformers, its assisted generation, all modes of SwiftSpec,
and llama.cpp if installed (extra `bench`).

    python -m bench.decode [--limit 8] [--max-tokens 128] [--json out.json]
    torchrun --standalone --nproc-per-node 2 -m bench.decode        # also mode async, with the draft on rank 1

An int4 target is also run dense, for a comparison at equal precision. Decoding is greedy unless --temperature is given;
then the baselines sample too, and the texts differ. The sampling defaults of many models are `--temperature 0.6 --top-p
0.95 --top-k 20 --repetition-penalty 1.05`. Every figure covers whole requests, prefill included, except
`decode`: tokens per second after the prefill. The systems alternate on every prompt, so that varying machine load
affects all of them. `--guidance-scale 1.5` adds SwiftSpec's modes with guidance, whose column `x unguided` is the speed
of decoding relative to the same mode without it.

With `--device cuda` transformers and SwiftSpec run on the GPU, by default also in mode async on the one GPU, or under
torchrun with a GPU for each model; llama.cpp, a baseline on the CPU, is left out. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.baselines.engines import load_transformers, write_dense
from bench.baselines.llama_plain import LlamaCpp, LlamaSampling, has_llama_cpp
from bench.common.device import add_device_flag, check_device
from bench.data import tasks
from bench.data.heldout import DEMO, read_prompts
from swiftspec.backends.cpu import cpu as host
from swiftspec.builder.load_options import LoadOptions
from swiftspec.builder.rules import resolve_config
from swiftspec.config import PROPOSAL_METHODS, VERIFY_METHODS, EngineConfig
from swiftspec.distributed.launch.world import available_cores, join_world, pin_to_cores
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams

DEFAULTS = EngineConfig()
GUIDED = ", guided"  # end of a system's name
GPU_CONTEXT = 2048  # tokens; all systems are loaded at the same time, and the first one would take a GPU's whole memory
# every system sets its own threads before it decodes


def load_options(args: argparse.Namespace) -> LoadOptions:
    """Returns the options with which SwiftSpec's systems are loaded."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    length = args.max_model_len
    if length is None and args.device == "cuda":
        length = min(GPU_CONTEXT, read_config(args.model).max_position_embeddings)
    return {
        "device": args.device, "threads": 1, "set_torch_threads": False, "dtype": dtype, "max_model_len": length,
        "gpu_trial": "off",  # what is measured are the operators that are asked for
    }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A system's answer to one prompt. Fields that the system does not report are 0."""

    tokens: list[int]
    rounds: int = 0  # target forwards
    decoded: int = 0  # tokens after the prefill, decoded in `decode_seconds`
    decode_seconds: float = 0.0


Generate = Callable[[list[int]], Answer]


@dataclass
class Result:
    """Totals of one system. `seconds` and `texts` have one entry per prompt and repeat."""

    name: str
    tokens: int = 0
    rounds: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / sum(self.seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the prefill; 0 if the system does not report them."""
        return self.decoded / self.decode_seconds if self.decoded else 0.0

    def add(self, answer: Answer, seconds: float) -> None:
        """Adds one answer and the duration of its request."""
        self.tokens += len(answer.tokens)
        self.rounds += answer.rounds
        self.decoded += answer.decoded
        self.decode_seconds += answer.decode_seconds
        self.seconds.append(seconds)
        self.texts.append(answer.tokens)


def transformers_system(target: Any, draft: Any | None, args: argparse.Namespace) -> Generate:
    """Returns a system that runs `generate` of transformers (with assisted generation if a draft is given) and counts
    its forwards."""
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    target.register_forward_hook(count)
    sampling: dict[str, Any] = {"do_sample": False, "repetition_penalty": args.repetition_penalty}
    if args.temperature:
        filters = {"top_k": args.top_k, "top_p": args.top_p}
        sampling |= {"do_sample": True, "temperature": args.temperature, **filters}
    extra = {"assistant_model": draft} if draft is not None else {}

    def generate(prompt: list[int]) -> Answer:
        before, ids = forwards, torch.tensor([prompt], device=target.device)
        with torch.inference_mode():
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **sampling,
                **extra,
            )
        return Answer(out[0, len(prompt) :].tolist(), forwards - before)

    return generate


def our_systems(name: str, llm: LLMEngine, args: argparse.Namespace, cores: set[int]) -> dict[str, Generate]:
    """Returns the systems that decode with the engine `llm` on the CPU cores `cores`: one, and with --guidance-scale
    another one with guidance."""
    made = {name: our_system(llm, args, cores, 1.0)}
    return (
        made if args.guidance_scale == 1 else made | {name + GUIDED: our_system(llm, args, cores, args.guidance_scale)}
    )


def our_system(llm: LLMEngine, args: argparse.Namespace, cores: set[int], guidance_scale: float = 1.0) -> Generate:
    """Returns a system that decodes with the engine `llm` on the CPU cores `cores`."""
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        guidance_scale=guidance_scale,
        max_tokens=args.max_tokens,
        ignore_eos=True,
        seed=args.seed,
    )

    def generate(prompt: list[int]) -> Answer:
        every, threads = available_cores(), torch.get_num_threads()
        pin_to_cores(cores)
        host.set_threads(min(len(cores), args.threads))
        torch.set_num_threads(1)  # the command does the same with native operators
        answer = llm.generate(prompt, sampling)
        pin_to_cores(every)
        torch.set_num_threads(threads)
        stats = answer.stats
        return Answer(answer.token_ids, stats.rounds, stats.tokens, stats.decode_time)

    return generate


def llama_cpp_systems(args: argparse.Namespace) -> dict[str, Generate]:
    """Returns systems of llama.cpp's autoregressive decoding, for every weight type, with one thread and with all, by
    name.

    Prints the reason and returns an empty dict if llama.cpp is not installed or cannot run the model.
    """
    if not has_llama_cpp():
        print("llama.cpp: not installed")
        return {}
    from bench.baselines.to_gguf import TYPES, write_gguf  # needs the extra `bench`, as llama.cpp does

    sampling = LlamaSampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)
    systems: dict[str, Generate] = {}
    with TemporaryDirectory() as folder:  # may be deleted afterwards, because a loaded model keeps its file mapped
        for kind in TYPES:
            file = Path(folder) / f"{kind}.gguf"
            try:
                write_gguf(args.model, file, kind)
            except UserError as error:
                print(f"llama.cpp: {error}")
                return {}
            for threads in sorted({1, args.threads}):
                name = f"llama.cpp {kind}, {threads} thread{'s' if threads > 1 else ''}"
                systems[name] = llama_cpp_system(LlamaCpp(file, threads, sampling), args)
    return systems


def llama_cpp_system(llama: LlamaCpp, args: argparse.Namespace) -> Generate:
    """Returns a system that decodes with llama.cpp, one forward per token. The prefill produces the first token."""

    def generate(prompt: list[int]) -> Answer:
        tokens, _, seconds = llama.generate(prompt, args.max_tokens)
        return Answer(tokens, len(tokens), len(tokens) - 1, seconds)

    return generate


def config_of(mode: str, args: argparse.Namespace, *, together: bool = False) -> EngineConfig:
    """Returns the engine configuration of one mode. `together`: in mode async, both models on one GPU instead of two
    ranks."""
    return EngineConfig(
        mode=mode,
        draft_tp=0 if together else -1,
        verify_batch=args.verify_batch,
        draft_leaves=args.draft_leaves,
        draft_steps=args.draft_steps,
        verify=args.verify,
        proposal=args.proposal,
        calibration=args.calibration,
    )


def build(args: argparse.Namespace) -> dict[str, Generate]:
    """Builds all systems that run in this process. The keys are their names in the table."""
    dtype, every = getattr(torch, args.dtype), available_cores()
    target, draft = (load_transformers(path, dtype).to(args.device) for path in (args.model, args.draft_model))
    systems = {
        "transformers": transformers_system(target, None, args),
        "transformers assisted": transformers_system(target, draft, args),
    }
    with TemporaryDirectory() as folder:
        models = {"": args.model}
        if read_config(args.model).quantization:
            write_dense(args.model, Path(folder), dtype)
            models[", dense target"] = Path(folder)
        for what, model in models.items():
            for mode in args.modes.split(","):
                draft_path = args.draft_model if mode != "ar" else None
                llm = LLMEngine(
                    model, draft_path, config_of(mode, args, together=mode == "async"), **load_options(args)
                )
                systems |= our_systems(f"swiftspec {mode}{what}", llm, args, every)
    return systems | (llama_cpp_systems(args) if args.device == "cpu" else {})


def measure(systems: dict[str, Generate], prompts: list[list[int]], repeats: int) -> list[Result]:
    """Runs every system on every prompt `repeats` times and returns the totals per system.

    The systems alternate on each prompt. Each runs one request as a warm-up first.
    """
    results = [Result(name) for name in systems]
    for generate in systems.values():
        generate(prompts[0])
    for prompt in prompts * repeats:
        for result, generate in zip(results, systems.values(), strict=True):
            began = time.perf_counter()
            answer = generate(prompt)
            result.add(answer, time.perf_counter() - began)
    return results


def report(results: list[Result], args: argparse.Namespace, prompts: int) -> dict[str, Any]:
    """Builds the JSON document: settings, machine, and one row per system."""
    plain, assisted = results[0], results[1]
    unguided = {r.name + GUIDED: r.decode_rate for r in results}
    rows = [
        {
            "system": r.name,
            "tokens_per_second": round(r.rate, 1),
            "decode_tokens_per_second": round(r.decode_rate, 1) if r.decoded else None,
            "tokens_per_round": round(r.tokens / r.rounds, 3) if r.rounds else None,
            "median_ms_per_request": round(1000 * statistics.median(r.seconds), 1),
            "ratio_to_transformers": round(r.rate / plain.rate, 2),
            "ratio_to_assisted": round(r.rate / assisted.rate, 2),
            "ratio_to_unguided": round(r.decode_rate / unguided[r.name], 2) if r.name in unguided else None,
            "same_text_as_transformers": sum(map(operator.eq, r.texts[:prompts], plain.texts)),
        }
        for r in results
    ]
    settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items() if k != "json"}
    settings |= {"prompts": prompts}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    if args.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    return {"settings": settings, "machine": machine, "systems": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Formats the rows as aligned text."""
    columns = {
        "system": "system",
        "tok/s": "tokens_per_second",
        "decode": "decode_tokens_per_second",
        "tok/round": "tokens_per_round",
        "x plain": "ratio_to_transformers",
        "x assisted": "ratio_to_assisted",
        "x unguided": "ratio_to_unguided",
        "same text": "same_text_as_transformers",
    }
    cells = [list(columns), *([str("-" if row[k] is None else row[k]) for k in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def arguments() -> argparse.Namespace:
    """Parses the command line. Exits with a message if the device is not available."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--draft-model", type=Path, default=DEMO / "draft")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="published task file, or JSONL file with field prompt (default: the held-out files)",
    )
    parser.add_argument("--task", choices=tasks.FAMILIES, help="use this project's prompts of this family instead")
    parser.add_argument("--limit", type=int, default=12, help="number of prompts")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, help="context; default: the model's, on a GPU at most 2048")
    parser.add_argument("--modes", help="default: ar,serial; on one GPU also async")
    add_device_flag(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--guidance-scale", type=float, default=1.0, help="also measure guidance (default: 1, without)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify-batch", type=int, default=DEFAULTS.verify_batch)
    parser.add_argument("--draft-leaves", type=int, default=DEFAULTS.draft_leaves)
    parser.add_argument("--draft-steps", type=int, default=DEFAULTS.draft_steps)
    parser.add_argument("--verify", choices=VERIFY_METHODS, default=DEFAULTS.verify)
    parser.add_argument("--proposal", choices=PROPOSAL_METHODS)
    parser.add_argument("--calibration", type=float)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_device(parser, args.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    alone = args.device == "cuda" and "RANK" not in os.environ
    args.draft_leaves = args.draft_leaves or resolve_config(DEFAULTS, "draft", args.device).draft_leaves
    args.modes = args.modes or ("ar,serial,async" if alone else "ar,serial")
    return args


def main() -> None:
    """Runs the comparison and prints the table."""
    import transformers

    args = arguments()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    world = join_world()
    if world is not None and world.rank > 0:
        torch.set_num_threads(1)
        serve_rank(world, args.model, args.draft_model, config_of("async", args), **load_options(args))
        return
    if world is not None:
        pin_to_cores(set(world.cores))  # the other systems' threads may use all cores
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    prompts = read_prompts(tokenizer)
    if args.prompts is not None or args.task is not None:
        texts = tasks.load(args.prompts) if args.prompts is not None else tasks.own(args.task)
        prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts = prompts[: args.limit]
    systems, together = build(args), None
    if world is not None:
        config = config_of("async", args)
        together = LLMEngine(args.model, args.draft_model, config, world=world, **load_options(args))
        systems |= our_systems("swiftspec async 1 + 1", together, args, world.own_cores())
    result = report(measure(systems, prompts, args.repeats), args, len(prompts))
    if together is not None:
        together.close()
    print(table(result["systems"]))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
