"""Offline generation: one prompt, one completion.

python examples/offline.py
python examples/offline.py --model TARGET --draft-model DRAFT --prompt "def fib(n):"
"""

import argparse

from transformers import AutoTokenizer

from swiftspec import LLM, EngineConfig, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="swiftspec/demo/target")
parser.add_argument("--draft-model", default="swiftspec/demo/draft")
parser.add_argument("--prompt", default="def read_lines(path):\n")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
llm = LLM(args.model, args.draft_model, EngineConfig(draft_steps=4, verify_batch=8))
completion = llm.generate(tokenizer(args.prompt).input_ids, SamplingParams(temperature=0.0, max_tokens=48))
llm.close()

print(args.prompt + tokenizer.decode(completion.token_ids))
stats = completion.stats
print(f"{len(completion.token_ids)} tokens in {stats.rounds} rounds, {stats.accepted} of them proposed by the draft")
