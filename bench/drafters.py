"""Drafters compared on completions and edits of code, free answers and agent traces: none, suffix lookup, the draft
model and a draft head, the last two alone and with suffix lookup grafted.

    python -m bench.drafters [--model FILE.gguf --draft-model FILE.gguf] [--head DIR] [--drafters none,model,head]
        [--sampled] [--draft-steps 3] [--repeats 3] [--max-tokens 192]

Each prompt is answered once by each drafter, greedily or with the sampling values that the configurations of many
models have, and the drafters alternate on every prompt. A repeat begins with new engines, since suffix lookup finds the
answers of earlier requests. The columns: tokens per round, milliseconds per round, tokens per second after the prefill
(median of the repeats), and the speed relative to decoding without a draft. All drafters must give the same text.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.chat import QUESTIONS, config, parse_with_pair
from bench.common.merged_drafter import MergedDrafter
from bench.common.roles import decode_on, local_roles
from bench.workload import COMMON_SAMPLING
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.world import available_cores
from swiftspec.drafter_kinds import GRAFTED, SUFFIX_LOOKUP
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.text.codec import TextCodec

FUNCTIONS = {
    "Rename the parameter `path` to `file_name`.": (
        "def count_words(path):\n    counts = {}\n    with open(path) as file:\n        for line in file:\n"
        "            for word in line.lower().split():\n                counts[word] = counts.get(word, 0) + 1\n"
        "    return counts\n"
    ),
    "Add a parameter `reverse=False` that is passed to `sorted`.": (
        "def rank_players(scores):\n    order = sorted(scores, key=lambda name: scores[name])\n    ranks = {}\n"
        "    for place, name in enumerate(order, start=1):\n        ranks[name] = place\n    return ranks\n"
    ),
    "Rename the function to `find_largest`.": (
        "def search(values):\n    best = None\n    for value in values:\n        if best is None or value > best:\n"
        "            best = value\n    if best is None:\n        raise ValueError('there are no values')\n"
        "    return best\n"
    ),
    "Add a docstring.": (
        "def moving_average(values, size):\n    result = []\n    total = 0.0\n    for i, value in enumerate(values):\n"
        "        total += value\n        if i >= size:\n            total -= values[i - size]\n"
        "        if i >= size - 1:\n            result.append(total / size)\n    return result\n"
    ),
    "Rename the variable `left` to `low` and `right` to `high`.": (
        "def binary_search(items, wanted):\n    left, right = 0, len(items)\n    while left < right:\n"
        "        middle = (left + right) // 2\n        if items[middle] < wanted:\n            left = middle + 1\n"
        "        else:\n            right = middle\n    return left\n"
    ),
    "Add a parameter `timeout` that is passed to `connect`.": (
        "def download(host, port, name):\n    connection = connect(host, port)\n    try:\n"
        "        connection.send(f'GET {name}')\n        header = connection.read_line()\n"
        "        size = int(header.split()[1])\n        return connection.read(size)\n    finally:\n"
        "        connection.close()\n"
    ),
    "Add type hints.": (
        "def merge_intervals(intervals):\n    merged = []\n    for start, end in sorted(intervals):\n"
        "        if merged and start <= merged[-1][1]:\n            merged[-1][1] = max(merged[-1][1], end)\n"
        "        else:\n            merged.append([start, end])\n    return merged\n"
    ),
    "Replace `print` by `log.info`.": (
        "def report(orders):\n    total = 0\n    for order in orders:\n        print('order', order.number)\n"
        "        for item in order.items:\n            print('item', item.name, item.price)\n"
        "            total += item.price\n    print('total', total)\n    return total\n"
    ),
}
HEAD_AND_MODEL = "head + model"
EDIT = "{task} Answer with the whole function and nothing else.\n\n```python\n{code}```"
FIX = "Show the corrected function, then the command that runs the tests again."


def agent_trace(task: str, code: str) -> list[str]:
    """Returns turns of user and assistant, alternately, as an agent that works on a repository exchanges them with its
    tools: a task, a command and its output, an edit, and a failed test."""
    name = code.partition("(")[0].removeprefix("def ")
    broken = code.replace("return", "retrun", 1)
    line = broken[: broken.index("retrun")].count("\n") + 1
    return [
        f"You work in a repository and answer with one command at a time. The task: {task}",
        f"```\ncat src/{name}.py\n```",
        f"$ cat src/{name}.py\n{code}$ ls tests\n__init__.py  conftest.py  test_{name}.py",
        f"```python\n{broken}```\n```\npython -m pytest -q tests/test_{name}.py\n```",
        f"$ python -m pytest -q tests/test_{name}.py\nE     File src/{name}.py, line {line}\n"
        f"E   {broken.splitlines()[line - 1]}\nE   SyntaxError: invalid syntax\n1 error in 0.04s\n{FIX}",
    ]


# by kind of text: conversations as turns of user and assistant, or a text without a chat template
TASKS: dict[str, Sequence[list[str] | str]] = {
    "completion": [code[: len(code) // 2] for code in FUNCTIONS.values()],
    "edits": [[EDIT.format(task=task, code=code)] for task, code in FUNCTIONS.items()],
    "free answers": [[question] for question in QUESTIONS[: len(FUNCTIONS)]],
    "agent traces": [agent_trace(task, code) for task, code in FUNCTIONS.items()],
}


def encode(codec: TextCodec, prompt: list[str] | str) -> list[int]:
    """Returns the tokens of a prompt of `TASKS`."""
    if isinstance(prompt, str):
        return codec.encode(prompt)
    roles = ("user", "assistant")
    return codec.encode_chat([{"role": roles[turn % 2], "content": text} for turn, text in enumerate(prompt)])


@dataclass
class Total:
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0


def engines(args: argparse.Namespace) -> dict[str, LLMEngine]:
    adaptive = config("serial", args)
    drafts: dict[str, tuple[str | Path | None, EngineConfig]] = {
        "none": (None, EngineConfig("ar")),
        "suffix": (SUFFIX_LOOKUP, adaptive),
        "model": (args.draft_model, replace(adaptive, drafter="model")),
        "model + suffix": (args.draft_model, replace(adaptive, drafter=GRAFTED)),
    }
    if args.head is not None:
        drafts["head"] = (args.head, replace(adaptive, drafter="model"))
        drafts["head + suffix"] = (args.head, replace(adaptive, drafter=GRAFTED))
    options = {"device": "cpu", "threads": args.threads, "max_model_len": 1024}
    chosen = drafts if args.drafters is None else ["none", *args.drafters.split(",")]
    unknown = {*chosen} - {*drafts, HEAD_AND_MODEL}
    if unknown:
        raise SystemExit(f"--drafters: {min(unknown)!r} is not one of {', '.join(drafts)}, {HEAD_AND_MODEL}")
    llms = {name: LLMEngine(args.model, *drafts[name], **options) for name in dict.fromkeys(chosen) if name in drafts}
    if args.head is not None and args.draft_steps is not None and (args.drafters is None or HEAD_AND_MODEL in chosen):
        of_head, of_model = (LLMEngine(args.model, *drafts[name], **options) for name in ("head", "model"))
        (head, verifier), (model, _) = local_roles(of_head), local_roles(of_model)
        decode_on(of_head, MergedDrafter(model, head, args.verify_batch), verifier)
        llms[HEAD_AND_MODEL] = of_head
    return llms


def run(llms: dict[str, LLMEngine], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Total]:
    """Returns the totals of each drafter. Raises AssertionError if two texts differ."""
    values: dict[str, Any] = {**COMMON_SAMPLING, "seed": 1} if args.sampled else {"temperature": 0}
    totals, sampling = defaultdict[str, Total](Total), SamplingParams(**values, max_tokens=args.max_tokens)
    for number, prompt in enumerate(prompts):
        names = [*llms]
        texts = dict[str, list[int]]()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = llms[name].generate(prompt, sampling)
            total, texts[name] = totals[name], answer.token_ids
            total.tokens += answer.stats.tokens
            total.rounds += answer.stats.rounds
            total.seconds += answer.stats.decode_time
        assert all(text == texts["none"] for text in texts.values()), "two drafters give different texts"
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"repeats": 3, "max-tokens": 192, "threads": len(available_cores())}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--head", type=Path, help="directory of a draft head")
    parser.add_argument("--drafters", help="names of drafters, comma-separated (default: all)")
    parser.add_argument("--sampled", action="store_true", help="sample instead of decoding greedily")
    parser.add_argument("--draft-steps", type=int, help="fixed shape of the tree (default: adapts, as in the chat)")
    parser.add_argument("--verify-batch", type=int, default=8, help="rows of a verification, with --draft-steps")
    args = parse_with_pair(parser)
    codec = TextCodec(args.model)
    found = defaultdict[tuple[str, str], list[Total]](list)
    for _ in range(args.repeats):
        llms = engines(args)
        for llm in llms.values():
            llm.generate([1, 2, 3], SamplingParams(max_tokens=8))
        for kind, texts in TASKS.items():
            prompts = [encode(codec, text) for text in texts]
            for name, total in run(llms, prompts, args).items():
                found[kind, name].append(total)
    print("| text | drafter | tokens per round | ms per round | tok/s | speed |\n|---|---|---|---|---|---|")
    for (kind, name), totals in found.items():
        rates = [total.tokens / total.seconds for total in totals]
        plain = [total.tokens / total.seconds for total in found[kind, "none"]]
        ratio = statistics.median(rate / base for rate, base in zip(rates, plain, strict=True))
        per_round = statistics.median(total.tokens / total.rounds for total in totals)
        ms = statistics.median(1000 * total.seconds / total.rounds for total in totals)
        print(f"| {kind} | {name} | {per_round:.2f} | {ms:.2f} | {statistics.median(rates):.1f} | {ratio:.2f} |")
    codec.close()


if __name__ == "__main__":
    main()
