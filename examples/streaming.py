"""Streaming: prints the text as it is verified, round by round.

python examples/streaming.py
"""

from swiftspec import LLM, SamplingParams

prompt = "def read_lines(path):\n"
print(prompt, end="")
with LLM("demo", draft_steps=4, verify_batch=8) as llm:
    for piece in llm.stream(prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=48)):
        print(piece.text, end="", flush=True)  # piece.accepted of its tokens were proposed by the draft
        if piece.stats is not None:  # the last piece
            print(f"\n{piece.finish_reason}: {piece.stats.tokens} tokens in {piece.stats.rounds} rounds")
