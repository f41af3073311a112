"""Exact batching: several requests are decoded concurrently, each with a chain of draft tokens.

The text of each request is the one that it has alone. Mode `serial` with `max_num_seqs` decodes that many at a time;
further prompts are queued.

    python examples/batch.py
"""

from transformers import AutoTokenizer

from swiftspec import LLM, EngineConfig, SamplingParams

TARGET, DRAFT = "swiftspec/demo/target", "swiftspec/demo/draft"
PROMPTS = ["import os\n", "def fib(n):\n", "class Stack:\n", "for line in "]

tokenizer = AutoTokenizer.from_pretrained(TARGET)
llm = LLM(TARGET, DRAFT, EngineConfig(max_num_seqs=2, draft_steps=4))
prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
completions = llm.generate_batch(prompts, SamplingParams(temperature=0.0, max_tokens=24))
llm.close()
for prompt, completion in zip(PROMPTS, completions, strict=True):
    print("---", completion.finish_reason)
    print(prompt + tokenizer.decode(completion.token_ids))
