"""Command /tree of the chat: shows the draft tree of a round and its verification."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from rich.console import Console
from rich.text import Text

from swiftspec.cli.terminal import ACCEPTED_STYLE, print_note, visible
from swiftspec.errors import UserError
from swiftspec.observe.recorder import TraceListener
from swiftspec.observe.trace_format import Record, RoundRecord, TraceEntry, to_record

MAX_ROUNDS = 2000  # in the history
MAX_AHEAD_NODES = 12  # surviving nodes that are shown, the likeliest ones
MAX_TOKEN_CHARS = 24  # longer tokens are cut


class RoundHistory:
    """The last rounds, recorded for the command /tree.

    `set_listener`: sets or removes the trace listener, see `LLMEngine.listen`. `token_text`: decodes one token.
    """

    def __init__(self, set_listener: Callable[[TraceListener | None], None], token_text: Callable[[int], str]) -> None:
        self._set_listener, self._token_text = set_listener, token_text
        self._rounds: deque[RoundRecord] = deque(maxlen=MAX_ROUNDS)
        self._recording = False

    def command(self, rest: str, console: Console) -> None:
        """Runs `/tree REST`. Raises UserError on an invalid argument."""
        if rest in ("on", "off"):
            self._recording = rest == "on"
            self._set_listener(self._add_rounds if self._recording else None)
            print_note(
                console, f"rounds are {'recorded from the next answer on' if self._recording else 'no longer recorded'}"
            )
        elif rest and not (rest.isascii() and rest.isdecimal() and len(rest) < 7):
            raise UserError(f"/tree: expected on, off or a number of rounds to go back, not {rest!r}")
        elif not self._rounds:
            raise UserError(
                "no round is recorded"
                + (": send a message" if self._recording else ": use /tree on, then send a message")
            )
        elif int(rest or 0) >= len(self._rounds):
            count = len(self._rounds)
            some = "1 round is" if count == 1 else f"{count} rounds are"
            raise UserError(f"only {some} recorded: /tree {count - 1} shows the first")
        else:
            for line in render_round(to_record(self._rounds[-1 - int(rest or 0)]), self._token_text):
                console.print(line, soft_wrap=True)

    def _add_rounds(self, noted: Sequence[TraceEntry]) -> None:
        self._rounds += (one for one in noted if isinstance(one, RoundRecord))


@dataclass(frozen=True, slots=True)
class RoundTree:
    """Draft tree of one round. Nodes are numbered by their position in `tokens`; node 0 is the root.

    `logprobs`: the draft's log-probability of the path from the root to each node; None if it was not recorded.
    `verified`: maps each verified node to its number in the proposal.
    `children`: maps each node to its children by token.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    logprobs: Sequence[float] | None
    verified: dict[int, int]
    children: dict[int, dict[int, int]]  # node -> {token: child}

    @staticmethod
    def from_record(line: Record) -> RoundTree:
        """Returns the draft tree of a trace record; if the record has none, the proposal as a tree."""
        proposal, tree = line["proposal"], line.get("draft", {}).get("tree")
        named: dict[str, Any] = proposal if tree is None else {name: each.tolist() for name, each in tree.items()}
        below: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(named["tokens"], named["parents"])):
            below.setdefault(parent, {})[token] = node
        places = [0]
        for token, parent in zip(proposal["tokens"][1:], proposal["parents"][1:]):
            places.append(below.get(places[parent], {}).get(token, -1))
        verified = {place: node for node, place in enumerate(places) if place >= 0}
        return RoundTree(named["tokens"], named["parents"], named.get("logprobs"), verified, below)

    def surviving_nodes(self, tokens: Sequence[int]) -> set[int]:
        """Returns the nodes that survive re-rooting after the output `tokens` of the round: the new root and the
        likeliest nodes below it, at most MAX_AHEAD_NODES. The set is empty if the tree does not contain the tokens."""
        node: int | None = 0
        for token in tokens:
            node = self.children.get(node, {}).get(token)
            if node is None:
                return set()
        assert node is not None
        surviving, weights = {node}, self.logprobs or [0.0] * len(self.tokens)
        for one in range(node + 1, len(self.tokens)):
            if self.parents[one] in surviving:
                surviving.add(one)
        return set(sorted(surviving, key=lambda one: (-weights[one], one))[: MAX_AHEAD_NODES + 1])


def render_round(line: Record, token_text: Callable[[int], str]) -> Iterator[Text]:
    """Yields the lines that show a round's tree and its verification. `line`: the trace record of the round."""
    nodes, path, proposal = RoundTree.from_record(line), set(line["path"]), line["proposal"]
    ahead = nodes.surviving_nodes(line["tokens"])
    wanted = {*nodes.verified, *ahead}
    others = len(nodes.tokens) - len(wanted)
    head = f"round {line['round']}: {len(proposal['tokens']) - 1} draft tokens verified, {len(path) - 1} accepted"
    yield Text(f"{head}; the target adds {_token_label(token_text(line['tokens'][-1]))}", "bold")
    yield Text(_token_label(token_text(nodes.tokens[0])))

    def subtree(node: int, margin: str) -> Iterator[Text]:
        children = [child for child in nodes.children.get(node, {}).values() if child in wanted]
        for child in children:
            last = child == children[-1]
            at = nodes.verified.get(child)
            accepted = at in path
            text = Text(margin + ("└─ " if last else "├─ "))
            text.append(
                _token_label(token_text(nodes.tokens[child])),
                ACCEPTED_STYLE if accepted else "red" if at is not None else "",
            )
            if nodes.logprobs is not None:
                text.append(f"  q {exp(nodes.logprobs[child] - nodes.logprobs[node]):.2f}", "dim")
            if at is not None and "p" in proposal:
                text.append(f"  p {proposal['p'][at]:.2f}", "dim")
            labels = ["accepted" if accepted else "rejected"] if at is not None else []
            if child in ahead and not accepted:
                labels.append("survives")
            text.append("  " + ", ".join(labels), "dim")
            yield text
            yield from subtree(child, margin + ("   " if last else "│  "))

    yield from subtree(0, "")
    if others > 0:
        yield Text(f"and {others} more nodes, not verified", "dim")


def _token_label(text: str) -> str:
    """Returns a token's text on one line, as a Python literal."""
    written = visible(repr(text))
    return written if len(written) <= MAX_TOKEN_CHARS else written[: MAX_TOKEN_CHARS - 1] + "…"
