"""Whole decodes and single steps of a pair of models, without a tokenizer, for a GPU machine without further packages.

    python -m bench.gpu.step [--pair demo | Llama-3-70B,Llama-3.2-3B] [--device cuda] [--steps 4] [--json out.json]
    torchrun --standalone --nproc-per-node 8 -m bench.gpu.step --pair Llama-3-70B,Llama-3.2-3B --split 6+2

A pair of shapes means the demo models width-expanded to these shapes in int4 (tools/width_expand), built in memory: the
speed is that of the large models, text and acceptance are real. The prompts are held-out texts, tokenised beforehand.
The text is compared with the demo target's own in float32; in bfloat16 texts diverge at a near-tie sooner or later.

Every mode is an `LLMEngine` as `swiftspec serve` builds it, with the same roles, streams, graphs and rounding: `serial`
runs the models alternately with a fixed d and bs, `adapt` with those that follow from measured times, as the server
does, `async` (only on a GPU) concurrently on two streams, `ar` the target alone. The engines share the loaded models.
With --split the target runs on the first x ranks and the draft on the next y, each rank with its shard, which it cuts
from layers that it builds in memory.
`host ms` is the time of a round minus that of both models; in mode `async` it is negative if the models overlap.
`step ms` is the time of one forward after `--context` tokens as the engine runs it, host time included: bs rows for the
target, w rows for the draft. `prefill tok/s` is the speed of prompts of several lengths up to `--context`.
`--multiprocessors 100,32` limits the projections of target and draft to so many multiprocessors, so that in mode
`async` both models find room at the same time.
`--rows 4,8,16,32` adds the time of a forward of each model over these numbers of rows, and `--trees 4,8;5,16` the
decodes in mode serial with these d and bs.
`round GB` are the bytes of weights and caches that a round reads at least, and `of copy` their share of what a copy of
this device moves in the time of a round. `--particles N,N` measures mode smc only, with `--draft-tokens` K, relative to
`ar`; `--ablate` then leaves out one optimisation at a time, as `bench.smc --groups` does.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from bench.common.roles import local_roles
from bench.data.heldout import DEMO, ROOT, read_token_ids
from bench.gpu.round_bytes import round_share
from bench.gpu.timing import copy_speed
from bench.gpu.tuning import add_tuned_option, read_tuning, with_tuning
from bench.smc_groups import ABLATED, leave_out
from swiftspec.backends.cuda import cuda
from swiftspec.builder.load_options import CacheName, HeadName, LoadModel, LoadOptions
from swiftspec.builder.memory_estimate import MemoryEstimate
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.distributed.launch.world import World, join_world
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import FORWARD_GRAPHS, GraphForwardExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.tree import mask as tree_mask
from tools.width_expand.checkpoint import write_config
from tools.width_expand.model import load as load_grown
from tools.width_expand.shapes import read_shape

MODES = ("serial", "adapt", "ar", "async")
REPEATS = 20
PROMPT_LENGTHS = (64, 128, 256, 512, 1000, 4000)  # tokens of the timed prompts, at most --context
PREFILLS = 3  # timed runs per prompt length
SPARE_POSITIONS = 512  # of a shared model, for the larger trees of later engines
PARTICLES = PopulationConfig()
WARM = 0.7  # temperature of particles; at temperature 0 all particles would be equal
TEXT = ROOT / "bench" / "data" / "demo_text.json"
Role = LocalDrafter | LocalVerifier


@contextmanager
def grown_pair(shapes: list[str], positions: int, seed: int = 0) -> Iterator[tuple[list[Path], LoadModel]]:
    """Yields directories with both width-expanded configurations, and the function that builds their models.
    `positions`: least context length that the configurations allow."""
    with tempfile.TemporaryDirectory() as folder:
        smalls: dict[Path, Path] = {}
        for role, shape in zip(("target", "draft"), shapes, strict=True):
            smalls[Path(folder) / role] = DEMO / role
            write_config(DEMO / role, read_shape(shape), "int4", Path(folder) / role)
            allow_positions(Path(folder) / role / "config.json", positions)

        def load(path: Path, /, **options: Any) -> Transformer:
            for name in ("progress", "packed_cache", "hidden_layers", "vocab_rows", "context"):
                del options[name]
            sizes = read_shape(str(path / "config.json"))
            return load_grown(smalls[path], sizes, "int4", seed=seed, **options)

        yield list(smalls), load


def allow_positions(file: Path, positions: int) -> None:
    """Raises the context length of a configuration to at least `positions`: the speed does not depend on it, and the
    text of such a long context is not used."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(config["max_position_embeddings"], positions)
    file.write_text(json.dumps(config) + "\n", encoding="utf-8")


class SharedModels:
    """Function that loads a model once, for several engines of this process. `sizes`: of the loaded models."""

    def __init__(self, load: LoadModel) -> None:
        self._load = load
        self._loaded: dict[Path, Transformer] = {}
        self.sizes: dict[Path, MemoryEstimate] = {}

    def __call__(self, path: Path, /, **options: Any) -> Transformer:
        if path not in self._loaded:
            positions = options["max_positions"] + SPARE_POSITIONS
            made = self._load(path, **options | {"max_positions": positions})
            int4_head = options["quantization"].head == "int4"
            self.sizes[path] = MemoryEstimate(
                read_config(path), made.dtype, 0, ops=options["ops"], cache_dtype=made.cache_dtype, int4_head=int4_head
            )
            self._loaded[path] = made
        assert options["max_positions"] <= self._loaded[path].max_positions
        return self._loaded[path]


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


def prefill_speed(role: Role, context: int) -> dict[str, float]:
    """Returns the tokens per second of prompts of each of PROMPT_LENGTHS up to `context`, median of PREFILLS runs
    after one that is not counted. Leaves the cache empty."""
    runner = role.runner
    speeds = {}
    for length in (length for length in PROMPT_LENGTHS if length <= context):
        tokens = np.random.default_rng(0).integers(0, 4096, length).tolist()
        times = []
        for _ in range(PREFILLS + 1):
            runner.cache.reset()
            before = runner.busy
            runner.prefill(tokens)
            times.append(runner.busy - before)
        speeds[str(length)] = length / median(times[1:])
    runner.cache.reset()
    return speeds


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
    llm: LLMEngine, prompts: list[list[int]], tokens: int, temperature: float = 0.0
) -> tuple[list[list[int]], dict[str, float]]:
    """Decodes all prompts and returns their tokens, with speed and times per round over all prompts.

    Each prompt is decoded once before, so that the timing does not include graph capture. If a round is a single graph,
    the time per model is unknown and reported as 0. If d and bs adapt, they are reported as they are at the end. Raises
    RuntimeError if the draft failed.
    """
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    before, done = ([llm.generate(prompt, sampling) for prompt in prompts] for _ in range(2))
    stats = [completion.stats for completion in done]
    lost = [one.stats.drafter_lost for one in before + done if one.stats.drafter_lost is not None]
    if lost:
        raise RuntimeError(f"the draft failed: {lost[0]}")
    seconds, rounds = sum(s.decode_time for s in stats), sum(s.rounds for s in stats)
    target, draft = sum(s.target_busy_time for s in stats), sum(s.draft_busy_time for s in stats)
    policy = stats[-1].policy
    shape = {} if policy is None else {"d": policy.steps, "bs": policy.nodes}
    return [completion.token_ids for completion in done], {
        "tok/s": sum(s.tokens for s in stats) / seconds,
        "tok/round": sum(s.tokens for s in stats) / rounds,
        "target ms": 1000 * target / rounds,
        "draft ms": 1000 * draft / rounds,
        "host ms": 1000 * (seconds - target - draft) / rounds,
        **shape,
    }


def mean_context(prompts: list[list[int]], tokens: int) -> int:
    """Returns the mean number of tokens in the cache while `tokens` tokens are decoded after each prompt."""
    return (sum(map(len, prompts)) // len(prompts)) + tokens // 2


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
    llm = LLMEngine(DEMO / "target", device="cpu", max_model_len=room, dtype=torch.float32, ops="reference")
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [llm.generate(prompt, sampling).token_ids for prompt in prompts]


def config_of(mode: str, args: argparse.Namespace) -> EngineConfig:
    """Returns the engine configuration of a mode on one device, or with `args.split` that of mode async on its
    ranks."""
    if args.split is not None:
        return EngineConfig("async", draft_steps=args.steps, target_tp=args.split[0], draft_tp=args.split[1])
    if mode == "async":
        return EngineConfig("async", draft_steps=args.steps, draft_tp=0)
    if mode == "adapt":
        return EngineConfig("serial", self_switch=True, adapt_steps=True, adapt_batch=True, drafter="model")
    return EngineConfig(mode, draft_steps=args.steps)


def positions_of(args: argparse.Namespace) -> int:
    """Returns the context length of all engines."""
    return args.context + 256


def options_of(args: argparse.Namespace, load: LoadModel) -> LoadOptions:
    """Returns the load options of all engines."""
    return {
        "device": args.device, "max_model_len": positions_of(args), "dtype": torch.bfloat16, "ops": args.ops,
        "head": args.head, "kv_cache_dtype": args.kv_cache_dtype, "load": load,
        "gpu_trial": "off",  # what is measured are the operators that are asked for
    }  # fmt: skip


def description(pair: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a result was measured with."""
    return {
        "pair": pair, "d": args.steps, "context": args.context, "head": args.head, "kv cache": args.kv_cache_dtype,
        "multiprocessors": args.multiprocessors, "tuned": bool(read_tuning(args.tuned)),
        "early starts": os.environ.get("SWIFTSPEC_EARLY_STARTS") != "0",  # csrc/cuda/launch.cuh
    }  # fmt: skip


@dataclass(slots=True)
class Measurement:
    """Measurement of a pair with engines that share their models. `paths`: of target and draft. `said`: the reference
    text of each prompt. `note`: called with `result` after every part. `texts`: by mode."""

    args: argparse.Namespace
    paths: list[Path]
    shared: SharedModels
    prompts: list[list[int]]
    said: list[list[int]]
    note: Callable[[dict[str, Any]], None]
    result: dict[str, Any]
    texts: dict[str, list[list[int]]] = field(default_factory=dict)

    def run_mode(self, mode: str) -> None:
        """Decodes in a mode; with the engine of mode serial also measures step times."""
        began, args, result = time.perf_counter(), self.args, self.result
        with self._engine(config_of(mode, args), None if mode == "ar" else self.paths[1]) as llm:
            result.setdefault("load s", time.perf_counter() - began)
            if mode == "serial":
                result["ops"] = operators_of(llm)
            self.texts[mode], speed = decode(llm, self.prompts, args.tokens)
            sizes = self.shared.sizes
            models = (sizes[self.paths[0]], None if mode == "ar" else sizes[self.paths[1]])
            forwards, context = int(speed.get("d") or args.steps), mean_context(self.prompts, args.tokens)
            result[mode] = speed | round_share(
                speed, *models, forwards=forwards, context=context, copy=result["copy GB/s"]
            )
            result.setdefault("same text", agreement(self.texts[mode], self.said))
            self.note(result)
            if mode == "serial":
                names = result["pair"].split(",") if result["pair"] != "demo" else ["demo target", "demo draft"]
                for part in step_times(llm, names, args):
                    result |= part
                    self.note(result)

    def run_tree(self, draft_steps: int, verify_batch: int) -> None:
        """Decodes in mode serial with these d and bs."""
        config = EngineConfig("serial", draft_steps=draft_steps, verify_batch=verify_batch)
        with self._engine(config, self.paths[1]) as llm:
            found, speed = decode(llm, self.prompts, self.args.tokens)
        same = {"same text": agreement(found, self.said)}
        self.result.setdefault("trees", {})[f"{draft_steps},{verify_batch}"] = speed | same
        self.note(self.result)

    @contextmanager
    def _engine(self, config: EngineConfig, draft: Path | None) -> Iterator[LLMEngine]:
        options = options_of(self.args, self.shared)
        # the memory check would count weights that an earlier engine has loaded a second time
        options["share_device"] = bool(self.shared.sizes)
        llm = LLMEngine(self.paths[0], draft, config, **options)
        yield llm
        _close(llm)


def measure(pair: str, args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures one pair in each of `args.modes`, mode ar last: speed, agreement with the reference text and among the
    modes.

    `note` is called with the results after every part, so that a later failure does not lose them.
    """
    prompts, said = read_token_ids(args.prompts), truth(read_token_ids(args.prompts), args.tokens)
    result: dict[str, Any] = description(pair, args) | {"copy GB/s": copy_speed(args.device)}
    with models_of(pair, positions_of(args)) as (paths, load):
        shared = SharedModels(with_options(paths, load, args))
        run = Measurement(args, paths, shared, prompts, said, note, result)
        for mode in args.modes:
            if mode != "ar":
                run.run_mode(mode)
        for d, bs in args.trees:
            run.run_tree(d, bs)
        if "ar" in args.modes:
            run.run_mode("ar")
    texts = run.texts
    for mode in texts.keys() - {"ar"} if "ar" in texts else ():
        result["tree equals ar" if mode == "serial" else f"{mode} equals ar"] = agreement(texts[mode], texts["ar"])
    note(result)
    return result


def _close(llm: LLMEngine) -> None:
    """Ends an engine and frees its caches and graphs before the next one allocates its own."""
    llm.close()
    gc.collect()


def operators_of(llm: LLMEngine) -> list[str]:
    """Returns the names of the operators of target and draft of an engine in mode serial."""
    drafter, verifier = local_roles(llm)
    return [role.runner.ops.name for role in (verifier, drafter)]


def step_times(llm: LLMEngine, names: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the step times and prefill speeds of the models of an engine in mode serial, with the CUDA operators also
    the step times without weight prefetch. `names`: of target and draft."""
    context: int = args.context
    drafter, verifier = local_roles(llm)
    roles: tuple[Role, Role] = (verifier, drafter)
    rows = (llm.config.verify_batch, llm.config.leaves_per_expansion)
    yield {"step ms": {name: step_time(role, count, context) for name, role, count in zip(names, roles, rows)}}
    if args.rows:
        yield {
            "rows ms": {
                name: {str(count): step_time(role, count, context) for count in args.rows}
                for name, role in zip(names, roles)
            }
        }
    yield {"prefill tok/s": {name: prefill_speed(role, context) for name, role in zip(names, roles)}}
    if all(role.runner.ops is cuda for role in roles):
        for role in roles:
            asking_ahead(role, False)
        times = {name: step_time(role, count, context) for name, role, count in zip(names, roles, rows)}
        for role in roles:
            asking_ahead(role, True)
        yield {"step ms, nothing asked for ahead": times}


def run_split(args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
    """Joins the ranks of --split and measures them. Returns None on ranks other than 0."""
    world, ranks = join_world(), sum(args.split)
    if world is None or world.size != ranks:
        raise UserError(f"--split requires {ranks} ranks: start it with torchrun --standalone --nproc-per-node {ranks}")
    return measure_split(args.pair, args, note, world)


def measure_split(
    pair: str, args: argparse.Namespace, note: Callable[[dict[str, Any]], None], world: World
) -> dict[str, Any] | None:
    """Measures mode async on the ranks of `args.split`. Returns None on ranks other than 0, which serve rank 0."""
    config = config_of("async", args)
    with models_of(pair, positions_of(args)) as (paths, load):
        options = options_of(args, load)
        if world.rank > 0:
            serve_rank(world, paths[0], paths[1], config, **options)
            return None
        began = time.perf_counter()
        llm = LLMEngine(paths[0], paths[1], config, world=world, **options)
        result = description(pair, args) | {"split": args.split, "load s": time.perf_counter() - began}
        prompts = read_token_ids(args.prompts)
        texts, result["async"] = decode(llm, prompts, args.tokens)
        result["same text"] = agreement(texts, truth(prompts, args.tokens))
        note(result)
        llm.close()
    return result


def measure_particles(pair: str, args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures mode smc for each number of particles, each with its ratio to mode ar at the same temperature, and the
    executor of the rounds.

    `note` as in `measure`. The models are built once, for the largest number of particles, which needs the most
    positions.
    """
    prompts = read_token_ids(args.prompts)
    context = mean_context(prompts, args.tokens)
    result: dict[str, Any] = {"pair": pair, "context": args.context, "K": args.draft_tokens}
    result["copy GB/s"] = copy_speed(args.device)
    with models_of(pair, positions_of(args)) as (paths, load):
        shared = SharedModels(with_options(paths, load, args))
        options: LoadOptions = {"device": args.device, "max_model_len": positions_of(args), "load": shared}
        options = {**options, "dtype": torch.bfloat16, "ops": args.ops, "gpu_trial": "off"}
        left_out = ["", *ABLATED] if args.ablate else [""]
        for count, without in itertools.product(sorted(args.particles, reverse=True), left_out):
            shape = PopulationConfig(count, args.draft_tokens, deferred_bonus=without != "deferred bonus")
            llm = LLMEngine(paths[0], paths[1], EngineConfig("smc", population=shape), **options)
            population = llm.roles.inner_roles
            assert isinstance(population, BatchScheduler)
            if args.ablate:
                leave_out(population, without)
            else:
                result["rounds"] = population.executors[0].name
            speed = decode(llm, prompts, args.tokens, WARM)[1]
            models = (shared.sizes[paths[0]], shared.sizes[paths[1]])
            share = round_share(speed, *models, forwards=args.draft_tokens, context=context, copy=result["copy GB/s"])
            result[f"smc {count}{without and f', without the {without}'}"] = speed | share
            note(result)
            _close(llm)
            del llm, population
        llm = LLMEngine(paths[0], None, EngineConfig("ar"), **options)
        result["ar"] = decode(llm, prompts, args.tokens, WARM)[1]
        result["ar"] |= round_share(
            result["ar"], shared.sizes[paths[0]], None, forwards=0, context=context, copy=result["copy GB/s"]
        )
        for name in (name for name in result if name.startswith("smc ")):
            result[name]["ratio to ar"] = result[name]["tok/s"] / result["ar"]["tok/s"]
        note(result)
        _close(llm)
    return result


@contextmanager
def models_of(pair: str, positions: int = 0) -> Iterator[tuple[list[Path], LoadModel]]:
    """Yields the directories of target and draft, and the function that loads them. `pair`: as --pair. `positions`: as
    in `grown_pair`."""
    if pair == "demo":
        yield [DEMO / "target", DEMO / "draft"], load_model
        return
    with grown_pair(pair.split(","), positions) as found:
        yield found


def with_options(paths: list[Path], load: LoadModel, args: argparse.Namespace) -> LoadModel:
    """Returns the function that loads the models of `paths` with what a trial has tuned, and with projections that
    occupy `args.multiprocessors`."""

    def load_with(path: Path, /, **options: Any) -> Transformer:
        options["ops"] = with_tuning(options["ops"], read_tuning(args.tuned))
        if args.multiprocessors:
            options["ops"] = options["ops"].with_operators(multiprocessors=args.multiprocessors[paths.index(path)])
        return load(path, **options)

    return load_with


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _trees(text: str) -> list[tuple[int, int]]:
    found = [_numbers(tree) for tree in text.split(";")]
    if any(len(tree) != 2 for tree in found):
        raise argparse.ArgumentTypeError("trees have the form 4,8;5,16: d,bs of each")
    return [(d, bs) for d, bs in found]


def _parts(text: str) -> list[int]:
    found = _numbers(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError("two numbers of multiprocessors: of target and draft")
    return found


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if not {*modes} <= {*MODES}:
        raise argparse.ArgumentTypeError(f"modes are {', '.join(MODES)}")
    return modes


def _split(text: str) -> list[int]:
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError("a split has the form 6+2: target ranks, draft ranks")
    return [int(found[1]), int(found[2])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", default="demo", help="demo, or two comma-separated shapes of tools/width_expand/shapes.py"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", type=_modes, help=f"{', '.join(MODES)}; default: all, async only on a GPU")
    parser.add_argument("--split", type=_split, help="x+y: mode async on x target and y draft ranks, under torchrun")
    parser.add_argument("--ops", default="auto", choices=("auto", "reference", "unfused"))
    parser.add_argument("--head", default="auto", choices=get_args(HeadName), help="LM head of the draft")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=get_args(CacheName))
    parser.add_argument("--steps", type=int, default=4, help="expansions per round")
    parser.add_argument("--trees", type=_trees, default=[], help="d,bs;d,bs: also decode with these tree shapes")
    parser.add_argument("--rows", type=_numbers, default=[], help="also time forwards over these numbers of rows")
    add_tuned_option(parser)
    parser.add_argument("--multiprocessors", type=_parts, help="x,y: that projections of target and draft occupy")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1000, help="tokens of context of the single steps")
    parser.add_argument("--json", type=Path, help="file for the result, written after every part")
    parser.add_argument("--least", type=float, default=0.0, help="minimum share of correct text, else exit with 1")
    parser.add_argument("--particles", type=_numbers, help="measure only mode smc, with N,N,... particles")
    parser.add_argument("--draft-tokens", type=int, default=PARTICLES.smc_draft_tokens, help="with --particles: K")
    parser.add_argument("--ablate", action="store_true", help="with --particles: also leave out one optimisation")
    parser.add_argument("--write-text", action="store_true", help=f"write {TEXT.name} again without measuring")
    args = parser.parse_args()
    if args.write_text:
        TEXT.unlink(missing_ok=True)
        TEXT.write_text(json.dumps(truth(read_token_ids(args.prompts), args.tokens)) + "\n", encoding="utf-8")
        return

    def note(result: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    args.modes = args.modes or [mode for mode in MODES if mode != "async" or args.device != "cpu"]
    try:
        if args.particles:
            print(json.dumps(measure_particles(args.pair, args, note), indent=1))
            return
        found = run_split(args, note) if args.split is not None else measure(args.pair, args, note)
    except UserError as error:
        parser.error(str(error))
    if found is None:
        return
    print(json.dumps(found, indent=1))
    if found["same text"] < args.least:
        raise SystemExit(f"only {found['same text']:.0%} of the text is correct, expected at least {args.least:.0%}")


if __name__ == "__main__":
    main()
