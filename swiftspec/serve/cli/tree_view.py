"""`/tree` in the chat: the draft tree of a round, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from rich.console import Console
from rich.text import Text

from swiftspec.errors import UserError
from swiftspec.observe.recorder import Listener
from swiftspec.observe.round_records import Noted, Round, opened
from swiftspec.observe.trace_format import Record
from swiftspec.serve.terminal import ACCEPTED, note, visible

MOST = 2000  # rounds that are kept
AHEAD = 12  # nodes kept ahead that are shown, the likeliest
WIDE = 24  # characters of a token


class Rounds:
    """The last rounds, while they are on record. `listen` is `LLM.listen`; `spell` makes text of a token."""

    def __init__(self, listen: Callable[[Listener | None], None], spell: Callable[[int], str]) -> None:
        self._listen, self._spell = listen, spell
        self._known: deque[Round] = deque(maxlen=MOST)
        self._on = False

    def command(self, rest: str, console: Console) -> None:
        """`/tree REST`. Raises UserError on what it does not take."""
        if rest in ("on", "off"):
            self._on = rest == "on"
            self._listen(self._hear if self._on else None)
            note(console, f"rounds are {'kept from the next answer on' if self._on else 'not kept any more'}")
        elif rest and not (rest.isascii() and rest.isdecimal() and len(rest) < 7):
            raise UserError(f"/tree takes on, off, or how many rounds to go back, not {rest!r}")
        elif not self._known:
            raise UserError("no round is on record" + (": ask something" if self._on else ": /tree on, then ask again"))
        elif int(rest or 0) >= len(self._known):
            raise UserError(f"only {len(self._known)} rounds are on record: /tree {len(self._known) - 1} is the first")
        else:
            for line in shown(opened(self._known[-1 - int(rest or 0)]), self._spell):
                console.print(line, soft_wrap=True)

    def _hear(self, noted: Sequence[Noted]) -> None:
        self._known += (one for one in noted if isinstance(one, Round))


@dataclass(frozen=True, slots=True)
class Nodes:
    """A tree, its root node 0. `verified`: the proposal's node of a node."""

    tokens: Sequence[int]
    parents: Sequence[int]
    logprobs: Sequence[float] | None
    verified: dict[int, int]
    below: dict[int, dict[int, int]]  # token -> node, of each node's children

    @staticmethod
    def of(line: Record) -> Nodes:
        """The draft's tree, or where nobody knows it the proposal."""
        proposal, tree = line["proposal"], line.get("draft", {}).get("tree")
        named: dict[str, Any] = proposal if tree is None else {name: each.tolist() for name, each in tree.items()}
        below: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(named["tokens"], named["parents"])):
            below.setdefault(parent, {})[token] = node
        places = [0]
        for token, parent in zip(proposal["tokens"][1:], proposal["parents"][1:]):
            places.append(below.get(places[parent], {}).get(token, -1))
        verified = {place: node for node, place in enumerate(places) if place >= 0}
        return Nodes(named["tokens"], named["parents"], named.get("logprobs"), verified, below)

    def ahead(self, tokens: Sequence[int]) -> set[int]:
        """What is left for the next round once these tokens are true: its root, and the likeliest nodes below it."""
        node: int | None = 0
        for token in tokens:
            node = self.below.get(node, {}).get(token)
            if node is None:
                return set()
        assert node is not None
        kept, weights = {node}, self.logprobs or [0.0] * len(self.tokens)
        for one in range(node + 1, len(self.tokens)):
            if self.parents[one] in kept:
                kept.add(one)
        return set(sorted(kept, key=lambda one: (-weights[one], one))[: AHEAD + 1])


def shown(line: Record, spell: Callable[[int], str]) -> Iterator[Text]:
    """A round, line by line."""
    nodes, path, proposal = Nodes.of(line), set(line["path"]), line["proposal"]
    ahead = nodes.ahead(line["tokens"])
    wanted = {*nodes.verified, *ahead}
    others = len(nodes.tokens) - len(wanted)
    head = f"round {line['round']}: {len(proposal['tokens']) - 1} guesses verified, {len(path) - 1} right"
    yield Text(f"{head}; the target adds {_name(spell(line['tokens'][-1]))}", "bold")
    yield Text(_name(spell(nodes.tokens[0])))

    def under(node: int, margin: str) -> Iterator[Text]:
        children = [child for child in nodes.below.get(node, {}).values() if child in wanted]
        for child in children:
            last = child == children[-1]
            at = nodes.verified.get(child)
            right = at in path
            text = Text(margin + ("└─ " if last else "├─ "))
            text.append(_name(spell(nodes.tokens[child])), ACCEPTED if right else "red" if at is not None else "")
            if nodes.logprobs is not None:
                text.append(f"  q {exp(nodes.logprobs[child] - nodes.logprobs[node]):.2f}", "dim")
            if at is not None and "p" in proposal:
                text.append(f"  p {proposal['p'][at]:.2f}", "dim")
            fate = ["right" if right else "wrong"] if at is not None else []
            text.append("  " + ", ".join([*fate, *(["kept ahead"] if child in ahead and not right else [])]), "dim")
            yield text
            yield from under(child, margin + ("   " if last else "│  "))

    yield from under(0, "")
    if others > 0:
        yield Text(f"and {others} more nodes, not verified", "dim")


def _name(text: str) -> str:
    """A token's text on one line, as Python would write it."""
    written = visible(repr(text))
    return written if len(written) <= WIDE else written[: WIDE - 1] + "…"
