"""Tracing: prints the draft tree, the accepted path and the times of one round.

python examples/trace_one_round.py
"""

import json
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from swiftspec import EngineConfig, SamplingParams
from swiftspec.llm_engine import LLMEngine

TARGET, DRAFT = "swiftspec/demo/target", "swiftspec/demo/draft"

tokenizer = AutoTokenizer.from_pretrained(TARGET)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "trace.jsonl"
    llm = LLMEngine(TARGET, DRAFT, EngineConfig(draft_steps=3, verify_batch=8), trace=path)
    llm.generate(tokenizer("def read_lines(path):\n").input_ids, SamplingParams(temperature=0.0, max_tokens=32))
    llm.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

rounds = [line for line in lines if "round" in line]
line = max(rounds, key=lambda each: len(each["path"]))
begin, end = line["target"]["verify"]
print(f"round {line['round']}: verified in {1000 * (end - begin):.2f} ms")
tokens, parents = line["proposal"]["tokens"], line["proposal"]["parents"]
depth = [0] * len(tokens)
for node, parent in enumerate(parents):
    depth[node] = depth[parent] + 1 if parent >= 0 else 0
    mark = "accepted" if node in line["path"] else "rejected"
    print(f"{'  ' * depth[node]}{tokenizer.decode([tokens[node]])!r}  {mark}")
print("output of the round:", repr(tokenizer.decode(line["tokens"])))
