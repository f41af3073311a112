"""Offline generation: several prompts, their outputs, and what they cost.

python examples/offline.py
python examples/offline.py --model TARGET --draft-model DRAFT --prompt "def fib(n):"
"""

import argparse

from swiftspec import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo")
parser.add_argument("--draft-model")
parser.add_argument("--prompt", action="append")
args = parser.parse_args()
prompts = args.prompt or ["def read_lines(path):\n", "import os\n"]

with LLM(args.model, args.draft_model, draft_steps=4, verify_batch=8) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48)):
        answer = output.outputs[0]
        print(f"{output.prompt}{answer.text}")
        stats = answer.stats
        print(f"{stats.tokens} tokens in {stats.rounds} rounds, {stats.accepted} of them proposed by the draft")
