"""Docstrings, comments and docs avoid the words that CONTRIBUTING.md rules out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conventions.sources import ROOT

# Each pattern marks a private idiom; the text after it names what to write instead.
WORDS = {
    r"nobody|no one": "name the thing: no observer, no rank, no subscriber",
    r"tells?|told": "sends, reports, notifies, returns",
    r"say(s|ing)?|said": "reports, states, contains, logs",
    r"hears?|heard": "receives",
    r"beside(?!s)": "next to, concurrently with, in addition to, compared with",
    r"by turns|in turn": "alternately, sequentially",
    r"at once": "immediately, or concurrently",
    r"mend(s|ed|ing)?": "fix",
    r"gives? way": "is evicted, yields",
    r"(?<!there )(?:is|are) (?:(?-i:none)|no(?! longer))": "is not a ... ('there is no ...' is fine)",
    r"who waits|whoever|who(m|se)?ever": "a noun: each waiting rank, any client",
    r"lest": "so that ... not",
    r"in (the )?place of": "instead of",
    r"sent home|go(es)? home": "shut down",
    r"makes? no sense": "is invalid",
    r"as it stands|as they stand": "unchanged",
    r"but for": "except",
    r"has no say": "is not used",
    r"so many|so much": "a number, or that many",
    r"dear": "expensive",
    r"a word|the words?(?= of| from| to)": "a message",
    r"in due time|should it be|by and by": "leave it out",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?:{word})' for word in WORDS)})\b", re.IGNORECASE)

# A phrase that may contain one of the words, and why.
ALLOWED = {
    "a word of": "machine words (32 or 64 bits) are a term of C++ and of the codecs",
    "the word of": "the same",
    "in-place": "the usual adjective",
}
SOURCES = ("swiftspec", "bench", "tools", "examples", "csrc")
NATIVE = {".h", ".cuh", ".cu", ".cpp"}


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                for number, line in enumerate(first.value.value.split("\n")):
                    yield first.lineno + number, line


def native_prose(source: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"//[^\n]*|/\*.*?\*/", source, re.DOTALL):
        start = source.count("\n", 0, found.start()) + 1
        yield from ((start + number, line) for number, line in enumerate(found.group().split("\n")))


def page_prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks, without inline code and link targets."""
    inside = False
    for number, line in enumerate(text.partition("\n## Retired words\n")[0].split("\n"), 1):
        inside ^= line.startswith("```")
        if not inside:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return page_prose(text)
    return python_prose(text) if path.suffix == ".py" else native_prose(text)


def files() -> list[Path]:
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in NATIVE | {".py"}]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    return [path for path in sorted([*found, *pages]) if "_pb2" not in path.name and path.name != "CONTRIBUTING.md"]


def complaints(lines: Iterator[tuple[int, str]]) -> list[str]:
    violations = []
    for number, line in lines:
        shortened = line
        for phrase in ALLOWED:
            shortened = shortened.replace(phrase, "")
        violations += [f"{number}: {found.group()!r} in {line.strip()!r}" for found in PATTERN.finditer(shortened)]
    return violations


def test_prose_uses_the_words_of_the_field() -> None:
    found = [f"{path.relative_to(ROOT)}:{each}" for path in files() for each in complaints(prose(path))]
    message = f"{len(found)} lines; see CONTRIBUTING.md, 'Names and prose'"
    assert not found, "\n".join([message, *found[:60]])


@pytest.mark.parametrize("text", ["# nobody waits", '"""Says why."""', "x = 1  # by turns"])
def test_a_private_word_is_found(text: str) -> None:
    assert complaints(python_prose(text))


def test_code_and_strings_are_left_alone() -> None:
    assert not complaints(python_prose('told = "nobody"\n# fine'))
    assert not complaints(page_prose("`told` is code\n```\nnobody\n```\n"))
    assert complaints(native_prose("int a;  // nobody\n/* b\n told */"))
