"""Streaming: prints each chunk when it is verified. Accepted draft tokens are in brackets, bonus tokens are not.

python examples/streaming.py
"""

from transformers import AutoTokenizer

from swiftspec import LLM, EngineConfig, SamplingParams

TARGET, DRAFT = "swiftspec/demo/target", "swiftspec/demo/draft"

tokenizer = AutoTokenizer.from_pretrained(TARGET)
llm = LLM(TARGET, DRAFT, EngineConfig(draft_steps=4, verify_batch=8))
prompt = "def read_lines(path):\n"
print(prompt, end="")
for chunk in llm.stream(tokenizer(prompt).input_ids, SamplingParams(temperature=0.8, seed=1, max_tokens=48)):
    accepted, bonus = chunk.token_ids[: chunk.accepted], chunk.token_ids[chunk.accepted :]
    print(f"[{tokenizer.decode(accepted)}]" if accepted else "", tokenizer.decode(bonus), sep="", end="", flush=True)
print()
llm.close()
