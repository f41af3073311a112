"""Word wrapping of text that is streamed to a terminal."""

from __future__ import annotations

from rich.cells import get_character_cell_size

TAB_CELLS = 8
Segment = tuple[str, bool]  # text, and whether it comes from accepted draft tokens


class WordWrap:
    """Breaks streamed text between words, at the width of a terminal.

    Characters are returned as they arrive. The end of a line that turns out to be part of a longer word is moved to the
    next line by control sequences. Words longer than a line, and text before and after a wide character, are broken
    anywhere.
    """

    def __init__(self) -> None:
        self._width = 0
        self._column = 0  # cells of the current line in use; the cursor's position, except in a full line
        self._word: list[Segment] = []  # characters of the word that ends at the cursor
        self._word_cells = 0
        self._out: list[Segment] = []

    def push(self, text: str, accepted: bool, width: int) -> list[Segment]:
        """Returns `text` with the line breaks and control sequences that it needs on a terminal of `width` cells.
        `text` contains no control characters except newlines and tabs."""
        if width != self._width:  # at the start, or the terminal was resized
            self._width, self._column = width, min(self._column, width)
            self._end_word()
        self._out = []
        for character in text:
            if character == "\n":
                self._break_line()
            elif character in " \t":
                self._add_space(character, accepted)
            else:
                self._add(character, accepted, get_character_cell_size(character))
        return _merged(self._out)

    def _add_space(self, character: str, accepted: bool) -> None:
        """Adds a space or a tab; drops it at the end of a full line."""
        self._end_word()
        if self._column < self._width:
            self._out.append((character, accepted))
            tab = (self._column // TAB_CELLS + 1) * TAB_CELLS
            self._column = self._column + 1 if character == " " else min(tab, self._width - 1)

    def _add(self, character: str, accepted: bool, cells: int) -> None:
        wide = cells == 2
        if wide:
            self._end_word()
        if self._column + cells > self._width:
            self._continue_on_next_line(cells)
        self._out.append((character, accepted))
        self._column += cells
        if wide:
            self._end_word()
        else:
            self._word.append((character, accepted))
            self._word_cells += cells

    def _continue_on_next_line(self, cells: int) -> None:
        """Begins a line and moves the current word to it, unless the word is as long as a line."""
        start, word, word_cells = self._column - self._word_cells, self._word, self._word_cells
        movable = word and start > 0 and word_cells + cells <= self._width
        if movable:
            self._out.append((f"\x1b[{start + 1}G\x1b[K", False))  # absolute: after a full line the cursor is ambiguous
        self._break_line()
        if movable:
            self._out += word
            self._column, self._word, self._word_cells = word_cells, word, word_cells

    def _break_line(self) -> None:
        self._out.append(("\n", False))
        self._column = 0
        self._end_word()

    def _end_word(self) -> None:
        self._word, self._word_cells = [], 0


def _merged(segments: list[Segment]) -> list[Segment]:
    """Joins adjacent segments of the same kind."""
    joined: list[Segment] = []
    for text, accepted in segments:
        if joined and joined[-1][1] == accepted:
            joined[-1] = (joined[-1][0] + text, accepted)
        else:
            joined.append((text, accepted))
    return joined
