"""Whole decodes and single steps of a pair of models, without a tokenizer, for a GPU machine without further packages.

    python -m bench.gpu.step [--pair demo | Llama-3-70B,Llama-3.2-3B] [--device cuda] [--steps 4] [--json out.json]

A pair of shapes means the demo models width-expanded to these shapes in int4 (tools/width_expand), built in memory: the
speed is that of the large models, text and acceptance are real. The prompts are held-out texts, tokenised beforehand.
The text is compared with the demo target's own in float32; in bfloat16 texts diverge at a near-tie sooner or later.

Mode `serial` runs the models alternately, `async` (only on a GPU) concurrently on two streams, `ar` the target alone.
`host ms` is the time of a round minus that of both models; in mode `async` it is negative if the models overlap.
`step ms` is the time of one forward after `--context` tokens as the engine runs it, host time included: bs rows for the
target, w rows for the draft. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from bench.common.roles import decode_on, growing_ahead, local_roles
from bench.data.heldout import DEMO, ROOT, read_token_ids
from swiftspec.backends import cuda
from swiftspec.batching.scheduler import BatchScheduler
from swiftspec.builder.load_options import CacheName, HeadName, LoadModel, LoadOptions
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError
from swiftspec.llm import LLM
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import FORWARD_GRAPHS, GraphForwardExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.overlapped import ThreadedVerifier
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree import mask as tree_mask
from tools.width_expand.checkpoint import write_config
from tools.width_expand.model import load as load_grown
from tools.width_expand.shapes import read_shape

REPEATS = 20
WARM = 0.7  # temperature of particles; at temperature 0 all particles would be equal
TEXT = ROOT / "bench" / "data" / "demo_text.json"
Role = LocalDrafter | LocalVerifier


@contextmanager
def grown_pair(shapes: list[str], seed: int = 0) -> Iterator[tuple[list[Path], LoadModel]]:
    """Yields directories with both width-expanded configurations, and the function that builds their models."""
    with tempfile.TemporaryDirectory() as folder:
        smalls: dict[Path, Path] = {}
        for role, shape in zip(("target", "draft"), shapes, strict=True):
            smalls[Path(folder) / role] = DEMO / role
            write_config(DEMO / role, read_shape(shape), "int4", Path(folder) / role)

        def load(path: Path, /, **options: Any) -> Transformer:
            if options.pop("group") is not None:
                raise UserError("a width-expanded model needs one rank, or to be written to disk first")
            for name in ("progress", "quantization", "packed_cache", "hidden_layers", "vocab_rows"):
                del options[name]
            sizes = read_shape(str(path / "config.json"))
            return load_grown(smalls[path], sizes, "int4", seed=seed, **options)

        yield list(smalls), load


def forwards(role: Role) -> EagerExecutor:
    """Returns the role's executor for single forwards, opened for a greedy request: CUDA graphs if the model can be
    captured, else eager."""
    steps = next(kind for kind in role.executors if type(kind) in (GraphForwardExecutor, EagerExecutor))
    assert isinstance(steps, EagerExecutor)
    steps.open(ExecutorRequest(role.runner.sampler(SamplingParams(temperature=0), ())))
    return steps


def step_time(role: Role, rows: int, context: int) -> float:
    """Returns the median milliseconds of a forward over `rows` nodes after `context` tokens. Leaves the cache empty."""
    runner, steps = role.runner, forwards(role)
    tokens = np.random.default_rng(0).integers(0, 4096, context)
    mask = tree_mask.from_parents([-1, *((row - 1) // 2 for row in range(1, rows))])
    runner.cache.reset()
    runner.prefill(tokens.tolist())
    times = []
    for _ in range(REPEATS + 2):
        busy = runner.busy
        steps.forward(runner.tree_batch(tokens[:rows], mask.sum(1) - 1, mask))
        times.append(1000 * (runner.busy - busy))
        runner.cache.commit(())
    runner.cache.reset()
    return median(times[2:])  # the first forwards may include graph capture


def asking_ahead(role: Role, on: bool) -> Role:
    """Enables or disables weight prefetch, in which a projection loads tiles of the next one. Returns `role`."""
    model = role.runner.model
    assert isinstance(model, Transformer)
    cuda.enable_weight_prefetch(model.stack, on)
    for steps in role.executors:
        if isinstance(steps, GraphForwardExecutor):
            steps.graphs.evict(FORWARD_GRAPHS)  # captured graphs contain the previous setting
    return role


def decode(
    llm: LLM, prompts: list[list[int]], tokens: int, temperature: float = 0.0
) -> tuple[list[list[int]], dict[str, float]]:
    """Decodes all prompts and returns their tokens, with speed and times per round over all prompts.

    Each prompt is decoded once before, so that the timing does not include graph capture. If a round is a single graph,
    the time per model is unknown and reported as 0. Raises RuntimeError if the draft failed.
    """
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    before, done = ([llm.generate(prompt, sampling) for prompt in prompts] for _ in range(2))
    stats = [completion.stats for completion in done]
    lost = [one.stats.drafter_lost for one in before + done if one.stats.drafter_lost is not None]
    if lost:
        raise RuntimeError(f"the draft failed: {lost[0]}")
    seconds, rounds = sum(s.decode_time for s in stats), sum(s.rounds for s in stats)
    target, draft = sum(s.target_busy_time for s in stats), sum(s.draft_busy_time for s in stats)
    return [completion.token_ids for completion in done], {
        "tok/s": sum(s.tokens for s in stats) / seconds,
        "tok/round": sum(s.tokens for s in stats) / rounds,
        "target ms": 1000 * target / rounds,
        "draft ms": 1000 * draft / rounds,
        "host ms": 1000 * (seconds - target - draft) / rounds,
    }


def agreement(texts: list[list[int]], truth: list[list[int]]) -> float:
    """Returns the share of the tokens of `truth` that come before the first difference in each text."""
    same = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(y)) for x, y in zip(texts, truth)]
    return sum(same) / sum(map(len, truth))


def truth(prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Returns the greedy texts of the demo target in float32 with the reference operators.

    Texts of the first prompts are stored (`--write-text`), so that a machine with a GPU does not have to compute them.
    """
    written = json.loads(TEXT.read_text(encoding="utf-8")) if TEXT.is_file() else []
    if len(prompts) <= len(written) and tokens <= len(written[0]):
        return [text[:tokens] for text in written[: len(prompts)]]
    room = max(map(len, prompts)) + tokens + 1
    llm = LLM(DEMO / "target", device="cpu", max_model_len=room, dtype=torch.float32, ops="reference")
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [llm.generate(prompt, sampling).token_ids for prompt in prompts]


def measure(pair: str, args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures one pair: speed with and without a draft tree, agreement with the reference text, step times.

    `note` is called with the results after every part, so that a later failure does not lose them.
    """
    prompts = read_token_ids(args.prompts)
    # no trial: what is measured are the operators that are asked for
    options: LoadOptions = {"device": args.device, "max_model_len": args.context + 256, "gpu_trial": "off"}
    said = truth(prompts, args.tokens)
    shapes = pair.split(",")
    with grown_pair(shapes) if pair != "demo" else _demo() as (paths, load):
        began = time.perf_counter()
        config = EngineConfig(draft_steps=args.steps)
        options = {**options, "dtype": torch.bfloat16, "ops": args.ops, "load": load}
        options = {**options, "head": args.head, "kv_cache_dtype": args.kv_cache_dtype}
        llm = LLM(paths[0], paths[1], config, **options)
        drafter, verifier = local_roles(llm)
        roles: tuple[Role, Role] = (verifier, drafter)
        names = [getattr(role.runner.ops, "__name__", "?").rpartition(".")[2] for role in roles]
        result: dict[str, Any] = {
            "pair": pair,
            "ops": names,
            "d": args.steps,
            "context": args.context,
            "load s": time.perf_counter() - began,
        }
        result["early starts"] = os.environ.get("SWIFTSPEC_EARLY_STARTS") != "0"  # csrc/cuda/launch.cuh
        result["few stages"] = os.environ.get("SWIFTSPEC_FEW_STAGES")  # csrc/cuda/device/device.cu
        result["head"], result["kv cache"] = args.head, args.kv_cache_dtype
        texts, result["serial"] = decode(llm, prompts, args.tokens)
        result["same text"] = agreement(texts, said)
        note(result)
        rows = (config.verify_batch, config.draft_leaves)
        names = shapes if pair != "demo" else ["demo target", "demo draft"]
        result["step ms"] = {
            name: step_time(role, count, args.context) for name, role, count in zip(names, roles, rows)
        }
        if all(role.runner.ops is cuda for role in roles):
            result["step ms, nothing asked for ahead"] = {
                name: step_time(asking_ahead(role, False), count, args.context)
                for name, role, count in zip(names, roles, rows)
            }
            for role in roles:
                asking_ahead(role, True)
        note(result)
        decode_on(llm, NoDrafter(), verifier)
        plain, result["ar"] = decode(llm, prompts, args.tokens)
        result["tree equals ar"] = agreement(texts, plain)
        note(result)
        if args.device == "cuda":
            config = EngineConfig("async", draft_steps=args.steps, draft_tp=0)
            decode_on(llm, growing_ahead(drafter, config, LookaheadDrafter), ThreadedVerifier(verifier))
            texts, result["async"] = decode(llm, prompts, args.tokens)
            result["async equals ar"] = agreement(texts, plain)
            note(result)
    return result


def measure_particles(pair: str, args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures mode smc for each number of particles: tokens per second and the executor of the rounds.

    `note` as in `measure`. The models are built once, for the largest number of particles, which needs the most
    positions.
    """
    prompts, shapes = read_token_ids(args.prompts), pair.split(",")
    result: dict[str, Any] = {"pair": pair, "context": args.context}
    made: dict[Path, Transformer] = {}
    with grown_pair(shapes) if pair != "demo" else _demo() as (paths, load):

        def once(path: Path, /, **options: Any) -> Transformer:
            return made[path] if path in made else made.setdefault(path, load(path, **options))

        for count in sorted(args.particles, reverse=True):
            config = EngineConfig("smc", population=PopulationConfig(particles=count))
            options: LoadOptions = {"device": args.device, "max_model_len": args.context + 256, "load": once}
            options = {**options, "dtype": torch.bfloat16, "ops": args.ops, "gpu_trial": "off"}
            llm = LLM(paths[0], paths[1], config, **options)
            result[f"smc {count}"] = decode(llm, prompts, args.tokens, WARM)[1]
            population = llm.roles.inner_roles
            assert isinstance(population, BatchScheduler)
            result["rounds"] = population.executors[0].name
            note(result)
            llm.close()
    return result


@contextmanager
def _demo() -> Iterator[tuple[list[Path], LoadModel]]:
    yield [DEMO / "target", DEMO / "draft"], load_model


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", default="demo", help="demo, or two comma-separated shapes of tools/width_expand/shapes.py"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", default="auto", choices=("auto", "reference", "unfused"))
    parser.add_argument("--head", default="auto", choices=get_args(HeadName), help="LM head of the draft")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=get_args(CacheName))
    parser.add_argument("--steps", type=int, default=4, help="expansions per round")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1000, help="tokens of context of the single steps")
    parser.add_argument("--json", type=Path, help="file for the result, written after every part")
    parser.add_argument("--least", type=float, default=0.0, help="minimum share of correct text, else exit with 1")
    parser.add_argument("--particles", type=_numbers, help="measure only mode smc, with N,N,... particles")
    parser.add_argument("--write-text", action="store_true", help=f"write {TEXT.name} again without measuring")
    args = parser.parse_args()
    if args.write_text:
        TEXT.unlink(missing_ok=True)
        TEXT.write_text(json.dumps(truth(read_token_ids(args.prompts), args.tokens)) + "\n", encoding="utf-8")
        return

    def note(result: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    try:
        if args.particles:
            print(json.dumps(measure_particles(args.pair, args, note), indent=1))
            return
        found = measure(args.pair, args, note)
    except UserError as error:
        parser.error(str(error))
    print(json.dumps(found, indent=1))
    if found["same text"] < args.least:
        raise SystemExit(f"only {found['same text']:.0%} of the text is correct, expected at least {args.least:.0%}")


if __name__ == "__main__":
    main()
