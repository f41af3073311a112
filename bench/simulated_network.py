"""Simulates asynchronous mode over a slow network on a simulated clock, without a fixed d; prints tokens per second.

    python -m bench.simulated_network [--delays 0.2,2,20] [--leaves 16,32] [--expansion 3.4] [--host 1]

The worker's `TreeDeltaSender` and the client's `ReplicaDrafter` run unmodified with the demo draft. The target's text
is known in advance (greedy, the prompts of bench/network_delay.py), and every step and message takes its configured
time. A different rule for expansions or proposals can therefore be evaluated within a minute. Times are milliseconds,
delays one way; `--host` is the loop's time per round.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence

from bench.data.heldout import texts
from bench.workers import NODES, PACES
from swiftspec.builder.drafters import build_drafter
from swiftspec.builder.models import Models
from swiftspec.builder.plan import Plan, draft_tree_slots
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.runtime.tree_delta_sender import TreeDeltaSender
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.codec import TextCodec
from swiftspec.tree.replica import TreeDelta, TreeReplica
from swiftspec.tree.tree import DraftTree

PROMPTS, TOKENS, MORE = 12, 128, 40  # the last round may overshoot by fewer than MORE tokens
Text = tuple[list[int], list[int]]  # a prompt and its continuation


class CountedLink:
    """A `TreeDeltaLink` to a simulated worker on the same clock.

    `now`: time of the client, in seconds. `_free`: time at which the draft becomes idle.
    """

    busy, answer_timeout_s = 0.0, 1.0

    def __init__(self, config: EngineConfig, delay: float, expansion: float) -> None:
        path = DEMO_MODELS.draft
        shape = EngineConfig(verify_batch=NODES, draft_leaves=config.draft_leaves, adapt_steps=True)
        models = Models.of(Plan.create(path, path, shape, None, {"only": "draft", "device": "cpu"}))
        drafter = build_drafter(
            *models.load_side("draft", config, None, None).runner(draft_tree_slots(config), CancelCheck()), config
        )
        assert isinstance(drafter, LookaheadDrafter)
        self._feed = TreeDeltaSender(drafter, self._say, config)
        self._delay, self._expansion, self.now = delay, expansion, 0.0

    def open(self, start: RequestStart) -> None:
        self._said, self._told = deque[tuple[float, TreeDelta]](), deque[tuple[float, VerifyResult]]()
        self._free, self._grows = self.now + self._delay, True
        self._feed.open(start)

    def send(self, result: VerifyResult) -> None:
        self._told.append((self.now + self._delay, result))

    def receive(self, deadline: float | None) -> TreeDelta | None:
        """Returns the next delta that has arrived.

        If none has arrived, returns None without a `deadline`; with one, advances the clock to the next arrival.
        """
        while self._free + self._expansion <= self.now + self._delay and self._step():
            pass
        while not self._said and deadline is not None:
            assert self._step(), "no further delta will arrive"
        if not self._said or (deadline is None and self._said[0][0] > self.now):
            return None
        came, delta = self._said.popleft()
        self.now = max(self.now, came)
        return delta

    def close(self) -> None:
        self._feed.close()

    def _say(self, delta: TreeDelta) -> None:
        self._said.append((self._free + self._delay, delta))

    def _step(self) -> bool:
        """Executes the draft's next action: handles a result that has arrived, or runs an expansion.

        Returns False if there is nothing to do.
        """
        if self._told and (self._told[0][0] <= self._free or not self._grows):
            came, result = self._told.popleft()
            self._free, self._grows = max(self._free, came), True
            self._feed.observe(result)
        elif self._grows:
            self._free += self._expansion
            self._grows = self._feed.grow()
        else:
            return False
        return True


def verified(proposal: Proposal, text: Sequence[int]) -> VerifyResult:
    """Returns the result of verifying a proposal if the target continues the prefix with `text`."""
    path, below = [0], list(zip(proposal.parents, proposal.tokens))
    while (path[-1], text[len(path) - 1]) in below:
        path.append(below.index((path[-1], text[len(path) - 1])))
    about = proposal.request, proposal.round, proposal.prefix_len
    return VerifyResult(*about, tuple(path), tuple(text[: len(path)]))


def run(known: Sequence[Text], leaves: int, delay: float, expansion: float, host: float) -> tuple[float, float, float]:
    """Simulates all texts. Returns tokens per second, tokens per round, and the share of rounds that waited for a
    proposal.

    `leaves`: w. `delay`: one way. `expansion`: per expansion. `host`: of the loop per round. Times are in seconds.
    """
    config = EngineConfig("async", verify_batch=NODES, draft_leaves=leaves, target_remote=True, draft_remote=True)
    link, slots = CountedLink(config, delay, expansion), draft_tree_slots(config)
    seconds, made, rounds, waited = 0.0, 0, 0, 0
    for prompt, text in known:
        drafter = ReplicaDrafter(
            link, TreeReplica(DraftTree(1 + slots * config.children_per_leaf, slots), 1 << 30), config
        )
        drafter.open(RequestStart(1, tuple(prompt), SamplingParams(temperature=0), len(prompt)))
        at, proposal, began = 0, drafter.propose(), link.now
        while True:
            result = verified(proposal, text[at:])
            link.now += host + 2 * delay + PACES["target"]
            drafter.grow()
            drafter.observe(result)
            at, rounds = at + len(result.tokens), rounds + 1
            if at >= TOKENS:
                break
            came = link.now
            proposal = drafter.propose()
            waited += link.now > came
        seconds, made = seconds + link.now - began, made + at
        drafter.close()
    return made / seconds, made / rounds, waited / rounds


def numbers(text: str) -> list[float]:
    """Parses comma-separated numbers."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Runs the simulation and prints the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulated_network", description=__doc__)
    parser.add_argument("--delays", type=numbers, default=[0.2, 2, 20])
    parser.add_argument("--leaves", type=numbers, default=[16, 32])
    parser.add_argument("--expansion", type=float, default=3.4)
    parser.add_argument("--host", type=float, default=1.0)
    args = parser.parse_args()
    target = DEMO_MODELS.target
    codec, llm = TextCodec(target), LLMEngine(target, None, EngineConfig("ar"), device="cpu", threads=1)
    known: list[Text] = []
    for prompt in texts()[:PROMPTS]:
        tokens = codec.encode(prompt, 1024)
        asked = SamplingParams(temperature=0, max_tokens=TOKENS + MORE, ignore_eos=True)
        known.append((tokens, llm.generate(tokens, asked).token_ids))
    print("delay ms  leaves   tok/s  tok/round  waited")
    for delay in args.delays:
        for leaves in args.leaves:
            found = run(known, int(leaves), 1e-3 * delay, 1e-3 * args.expansion, 1e-3 * args.host)
            print(f"{delay:8g}  {leaves:6g}  {found[0]:6.1f}  {found[1]:9.2f}  {found[2]:6.0%}", flush=True)
    codec.close()


if __name__ == "__main__":
    main()
