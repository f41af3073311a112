"""Asynchronous mode on two ranks: rank 0 runs the target, rank 1 the draft, at the same time.

torchrun --standalone --nproc-per-node 2 examples/two_ranks.py
"""

from transformers import AutoTokenizer

from swiftspec import EngineConfig, SamplingParams
from swiftspec.distributed.launch.world import join_world
from swiftspec.llm_engine import LLMEngine, serve_rank

TARGET, DRAFT = "swiftspec/demo/target", "swiftspec/demo/draft"

world = join_world()
config = EngineConfig(mode="async", target_tp=1, draft_tp=1, draft_steps=2)
if world.rank:
    serve_rank(world, TARGET, DRAFT, config)  # returns when rank 0 closes its engine
else:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    llm = LLMEngine(TARGET, DRAFT, config, world=world)
    prompt = "def read_lines(path):\n"
    completion = llm.generate(tokenizer(prompt).input_ids, SamplingParams(temperature=0.0, max_tokens=48))
    llm.close()
    print(prompt + tokenizer.decode(completion.token_ids))
    print(f"{completion.stats.rounds} rounds")
