"""What a model thinks before it answers: <think>...</think>, told from the answer in text that comes in pieces."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def may_begin(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of a marker that is not all there."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


class Reasoning:
    """Tells thoughts from what is said. Independent of where the pieces are cut. Newlines next to the markers belong to
    neither. `begun`: the prompt has opened the thoughts already."""

    def __init__(self, begun: bool) -> None:
        self._begun = begun
        self._step = self._before
        self._held = ""
        self._taken = 0
        self.end: int | None = None  # how many characters of the text it was until the thoughts had ended

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """More of the text. Returns thoughts and said words that are certain by now; all of them with `last`."""
        self._held += text
        self._taken += len(text)
        thought = said = ""
        while True:
            step = self._step
            more_thought, more_said = step(last)
            thought, said = thought + more_thought, said + more_said
            if self._step == step:
                return thought, said

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought, as far as can be told."""
        return self._step in (self._inside, self._fresh)

    def _before(self, last: bool) -> tuple[str, str]:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._step = text[len(OPEN) :], self._fresh
        elif last or not OPEN.startswith(text):
            self._step = self._fresh if self._begun else self._after
        return "", ""

    def _fresh(self, last: bool) -> tuple[str, str]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._inside
        return "", ""

    def _inside(self, last: bool) -> tuple[str, str]:
        thought, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._held, self._step = rest, self._gap
            self.end = self._taken - len(rest)
            return thought.rstrip("\n"), ""
        sure = thought if last else thought[: len(thought) - may_begin(thought, CLOSE)].rstrip("\n")
        self._held = thought[len(sure) :]
        return sure, ""

    def _gap(self, last: bool) -> tuple[str, str]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._after
        return "", ""

    def _after(self, last: bool) -> tuple[str, str]:
        said, self._held = self._held, ""
        return "", said
