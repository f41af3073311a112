"""Several requests are decoded concurrently, each with its own draft tree.

The text of each request is the one that it has alone. `max_num_seqs` are decoded at a time; further prompts are queued.

    python examples/batch.py
"""

from swiftspec import LLM, SamplingParams

PROMPTS = ["import os\n", "def fib(n):\n", "class Stack:\n", "for line in "]

with LLM("demo", max_num_seqs=2, draft_steps=4) as llm:
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24)):
        print("---", output.outputs[0].finish_reason)
        print(f"{output.prompt}{output.outputs[0].text}")
