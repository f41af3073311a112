"""Quality of mode smc in terms of results: the share of completions that parse and that pass their tests.

    python -m bench.quality [--seeds 12] [--plot docs/quality.svg]                 # functions, demo models
    python -m bench.quality --gsm8k test.jsonl --model TARGET --draft-model DRAFT  # word problems, other models
    python -m bench.quality --dial 4 --plot docs/dial.svg              # from particles to exact verification
    python -m bench.quality --dial 4 --model SMOLLM2.gguf --draft-model swiftspec/demo/smollm2/draft.gguf

Each function of bench/data/functions.py is completed by plain sampling, by exact speculation and by particles with
several N, K and powers (alpha); the systems alternate. With `--dial K` the particles have K draft tokens, of which 0 to
K are verified exactly (`smc_exact`), powers are left out, and the plot shows tokens per round instead of tokens per
second, because on a CPU only rounds without exactly verified tokens are one native call.

A completion ends with the function. It parses if `ast` accepts the whole function, and passes if its asserts hold in a
separate process (bench/sandbox.py). Further columns: the target's log-probability per token of the completions at
temperature 1; whether any of several answers passes (all N particles of one request, or FEW answers of another system,
which take that many requests); the mean number of different texts
among those.

Standard errors are over the seeds, for this fixed set of functions. One thread is timed by its CPU time.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.data.functions import FUNCTIONS, Function
from bench.data.heldout import DEMO
from bench.data.tasks import load, numbers_of
from bench.figure import scale_speeds, svg_axes
from bench.sandbox import Sandbox
from bench.smc import scorer
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Completion
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.text.codec import TextCodec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = ((1, 4, 1.0), (4, 4, 1.0), (16, 4, 1.0), (4, 1, 1.0), (4, 4, 2.0), (16, 4, 2.0), (16, 4, 4.0))  # N, K, alpha
FEW = 4  # answers of which any may pass, for systems without particles
Judge = Callable[[int, str], tuple[bool, bool]]  # (number of the task, completion) -> (parses, passes)


@dataclass
class System:
    """One decoding configuration and its answers: one row of `texts` per task, one text per seed."""

    name: str
    llm: LLMEngine
    temperature: float
    texts: list[list[str]] = field(default_factory=list)
    particles: list[list[list[str]]] = field(default_factory=list)  # all particles of each text's request
    likelihood: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    def add(self, task: int, answer: Completion, said: Callable[[Sequence[int]], str]) -> None:
        """Adds one answer to the task with number `task`. The last argument converts tokens to text."""
        while len(self.texts) <= task:
            self.texts.append([])
            self.particles.append([])
        end = answer.stats.population
        self.texts[task].append(said(answer.token_ids))
        self.particles[task].append([] if end is None else [said(each.tokens) for each in end.particles])
        self.tokens += len(answer.token_ids)
        self.rounds += answer.stats.rounds
        self.seconds += answer.stats.decode_time


def systems(args: argparse.Namespace) -> list[System]:
    """Returns the systems: plain sampling at temperatures T, T / 2 and T / 4, exact speculation, and the particles of
    SHAPES; with `--dial` plain sampling at T, exact speculation, and the particles of the dial.

    Sampling at T / alpha is what a power alpha of the distribution of each single token gives.
    """
    hot, paths = args.temperature, (args.model, args.draft_model)
    powers, populations = (1, 2, 4), [PopulationConfig(n, k, power=power) for n, k, power in SHAPES]
    if args.dial is not None:
        powers, populations = (1,), [PopulationConfig(4, args.dial, smc_exact=k) for k in range(args.dial + 1)]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "max_model_len": args.context, "device": args.device}
    options |= {"threads": args.threads, "gpu_trial": "off"}
    plain = LLMEngine(args.model, config=EngineConfig("ar"), **options)
    made = [System(f"plain, T = {hot / power:g}", plain, hot / power) for power in powers]
    made.append(System("exact speculation", LLMEngine(*paths, EngineConfig("serial"), **options), hot))
    for each in populations:
        name = f"smc N = {each.particles}, K = {each.smc_draft_tokens}"
        name += f", alpha = {each.power:g}" if args.dial is None else f", {each.smc_exact} of K exact"
        made.append(System(name, LLMEngine(*paths, EngineConfig("smc", population=each), **options), hot))
    return made


def finished(prompt: str, text: str) -> str:
    """Returns the part of `text` inside the function: up to the first line that is not indented deeper than its
    `def`."""
    depth = next(_indent(line) for line in reversed(prompt.split("\n")) if line.lstrip().startswith("def "))
    first, *rest = text.split("\n")
    ends = [at for at, line in enumerate(rest) if line.strip() and _indent(line) <= depth]
    return "\n".join([first, *(rest[: ends[0]] if ends else rest)])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def of_functions(functions: Sequence[Function], sandbox: Sandbox) -> Judge:
    """Returns a judge of completed functions: whether a function parses, and whether its asserts pass."""

    def judge(task: int, text: str) -> tuple[bool, bool]:
        program = functions[task].prompt + text
        try:
            ast.parse(program)
        except (SyntaxError, ValueError):
            return False, False
        return True, sandbox.passes(f"{program}\n{functions[task].asserts}\n")

    return judge


def of_sums(wanted: Sequence[str]) -> Judge:
    """Returns a judge of numeric answers: whether there is a number, and whether the last one equals the entry of
    `wanted`."""

    def judge(task: int, text: str) -> tuple[bool, bool]:
        found = numbers_of(text)
        return bool(found), found[-1:] == [wanted[task]]

    return judge


def measure(made: Sequence[System], prompts: Sequence[Sequence[int]], said: Callable[[int, Sequence[int]], str],
            args: argparse.Namespace) -> None:  # fmt: skip
    """Runs every system on every prompt with every seed, alternating between systems."""
    for system in made:
        system.llm.generate(prompts[0], SamplingParams(system.temperature, max_tokens=8))
    score = scorer(1.0, args.model) if args.gsm8k is None else None
    known = dict[tuple[int, ...], float]()
    for seed in range(args.seeds):
        for task, prompt in enumerate(prompts):
            for system in made:
                sampling = SamplingParams(system.temperature, seed=seed, max_tokens=args.max_tokens)
                answer = system.llm.generate(prompt, sampling)
                system.add(task, answer, lambda tokens, task=task: said(task, tokens))
                key = (task, *answer.token_ids)
                if score is not None and key not in known:
                    known[key] = score(prompt, answer.token_ids)
                system.likelihood.append(known.get(key, math.nan))


def stratified(found: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the mean of `found` [tasks, seeds], and its standard error over the seeds for this fixed set of tasks."""
    rows = np.array(found, dtype=float)
    tasks, seeds = rows.shape
    error = math.sqrt(float(rows.var(1, ddof=1).sum()) / seeds) / tasks if seeds > 1 else math.nan
    return float(rows.mean()), error


@dataclass
class Row:
    """Results of a system. Pairs are (mean, standard error).

    `any_passes`: whether any of `few` answers passes. `different`: mean number of different texts among them.
    """

    system: System
    parses: tuple[float, float]
    passes: tuple[float, float]
    any_passes: tuple[float, float]
    different: float
    log_p: tuple[float, float]
    few: int


def judged(system: System, judge: Judge) -> Row:
    """Judges all answers of a system."""
    found = [[judge(task, text) for text in texts] for task, texts in enumerate(system.texts)]
    several: list[list[list[str]]] = []
    for texts, particles in zip(system.texts, system.particles, strict=True):
        rows = [row for row in particles if row]
        several.append(rows or [texts[at : at + FEW] for at in range(0, len(texts) - FEW + 1, FEW)])
    some = [[any(judge(task, text)[1] for text in row) for row in rows] for task, rows in enumerate(several)]
    count = np.mean([len({*row}) for rows in several for row in rows])
    likelihood = np.array(system.likelihood).reshape(-1, len(system.texts)).T
    return Row(
        system, stratified([[parses for parses, _ in row] for row in found]),
        stratified([[passes for _, passes in row] for row in found]), stratified(some), float(count),
        stratified([[*row] for row in likelihood]), len(several[0][0]),
    )  # fmt: skip


def percent(share: tuple[float, float]) -> str:
    """Formats a share with its standard error, which is left out where a single sample has none."""
    mean, error = (100 * part for part in share)
    return f"{mean:.1f} %" if math.isnan(error) else f"{mean:.1f} ± {error:.1f} %"


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown, shares in percent."""
    plain = rows[0].system.rate
    head = ["", "tok/s", "speed", "tokens per round", "parses", "passes", "any passes", "different", "log p"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        share = [percent(each) for each in (row.parses, row.passes)]
        some = f"{percent(row.any_passes)} of {row.few}"
        speed = [f"{row.system.rate:.0f}", f"{row.system.rate / plain:.2f}x", f"{row.system.tokens_per_round:.2f}"]
        log_p = "-" if math.isnan(row.log_p[0]) else "{:.2f} ± {:.2f}".format(*row.log_p)  # not scored for GSM8K
        lines.append([row.system.name, *speed, *share, some, f"{row.different:.2f}", log_p])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(axes: Axes, points: Sequence[tuple[str, float, float, float]], title: str, xlabel: str) -> None:
    """Draws the share of completions that pass against a measure of speed, with numbered points and a legend.

    `points`: name, speed, share, and standard error of the share.
    """
    for number, (name, speed, share, error) in enumerate(points, 1):
        colour = "C3" if "smc" in name else "C0"
        axes.errorbar(speed, share, error, marker="o", markersize=4, color=colour, label=f"{number}  {name}")
        axes.annotate(str(number), (speed, share), (4, 4), textcoords="offset points", color=colour)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_title(title, loc="left")
    axes.set_xlabel(xlabel)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def tasks(
    args: argparse.Namespace, codec: TextCodec
) -> tuple[list[list[int]], Callable[[int, Sequence[int]], str], Any]:
    """Returns the prompts, the function from an answer's tokens to its text, and the right answers if numeric."""
    if args.gsm8k is None:
        prompts = [codec.encode(each.prompt) for each in FUNCTIONS]
        return prompts, lambda task, tokens: finished(FUNCTIONS[task].prompt, codec.decode(tokens)), None
    records = [json.loads(line) for line in args.gsm8k.read_text(encoding="utf-8").splitlines() if line.strip()]
    wanted = [numbers_of(record["answer"])[-1] for record in records[: args.limit]]
    texts = load(args.gsm8k)[: args.limit]
    if codec.has_template:
        prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
    else:
        prompts = [codec.encode(f"Question: {text}\nAnswer:") for text in texts]
    return prompts, lambda task, tokens: re.split(r"\nQuestion:", codec.decode(tokens))[0], wanted


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, default=12, help="answers per system and prompt, at least 4")
    made.add_argument("--temperature", type=float, default=0.7)
    made.add_argument("--max-tokens", type=int, default=24)
    made.add_argument("--gsm8k", type=Path, help="test.jsonl of GSM8K; scores the exact match of the last number")
    made.add_argument("--dial", type=int, metavar="K", help="four particles with 0 to K exactly verified draft tokens")
    made.add_argument("--limit", type=int, default=100, help="records to use, with --gsm8k")
    made.add_argument("--model", type=Path, default=DEMO / "target")
    made.add_argument("--draft-model", type=Path, default=DEMO / "draft")
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--plot", type=Path)
    return made


def main() -> None:
    """Prints the table and draws the plot."""
    args = parser().parse_args()
    if args.seeds < FEW:
        parser().error(f"--seeds must be at least {FEW}")
    torch.set_num_threads(args.threads)
    if args.threads == 1:
        time.perf_counter = time.thread_time  # clock of the engine
    prompts, said, wanted = tasks(args, TextCodec(args.model))
    made = systems(args)
    measure(made, prompts, said, args)
    with Sandbox() as sandbox:
        judge = of_functions(FUNCTIONS, sandbox) if wanted is None else of_sums(wanted)
        rows = [judged(system, judge) for system in made]
    print(table(rows))
    if args.plot:
        plain = rows[0].system.rate
        title = f"completions that pass their asserts: {len(prompts)} functions, {args.seeds} seeds each"
        with svg_axes(args.plot) as axes:
            if args.dial is None:
                points = [(row.system.name, row.system.rate / plain, *row.passes) for row in rows]
                scale_speeds(axes)
                draw(axes, points, title, "tokens per second relative to plain sampling")
            else:
                points = [(row.system.name, row.system.tokens_per_round, *row.passes) for row in rows]
                draw(axes, points, title, "tokens per round of the target")


if __name__ == "__main__":
    main()
