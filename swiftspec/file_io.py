"""The gate: the one place where a file that somebody else wrote is read as text or JSON.

What comes through it is a regular file of bounded size, UTF-8, and JSON that is not nested beyond measure and holds
numbers only. Everything else is a UserError that names the file and the reason.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from swiftspec.errors import UserError, truncated_repr

SMALL_FILE_BYTES = 1 << 20  # bytes of what a person writes
MAX_FILE_BYTES = 16 << 20  # bytes of configs and profiles; each of these is a bound, not a guess at what is usual
MAX_JSON_DEPTH = 64  # levels of brackets
MAX_ERROR_CHARS = 300  # characters of another program's complaint that are passed on
MIN_INT, MAX_INT = -(2**63), 2**63 - 1
FILE_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_file(path: str | Path) -> bool:
    """Whether a regular file, or a link to one, can be seen there. A name that no file can have is no error."""
    return os.path.isfile(path)  # noqa: PTH113  (pathlib raises on names too long and folders closed to us)


def is_folder(path: str | Path) -> bool:
    """The same of a folder."""
    return os.path.isdir(path)  # noqa: PTH112


def expand_user(name: str) -> Path:
    """A path with `~` and `~somebody` put in full. Raises UserError where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(
            f"{truncated_repr(name)}: there is no such user, or it has no home: write the path in full"
        ) from None


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of bounded length."""
    words = _printable(" ".join(str(error).split())) or type(error).__name__
    return words if len(words) <= MAX_ERROR_CHARS else words[: MAX_ERROR_CHARS - 3] + "..."


def open_file(file: Path, name: str | None = None) -> BinaryIO:
    """A regular file, open for reading. A pipe or a device is not waited for. `name`: what to call it in an error."""
    name = _display_name(file, name)
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {_reason(error)}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = FILE_KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{name} cannot be read: it is {kind}, and a regular file is needed")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The contents of a regular file of at most `most` bytes."""
    name = _display_name(file, name)
    with open_file(file, name) as stream:
        return read_stream(stream, name, max_bytes)


def read_stream(stream: BinaryIO, name: str, max_bytes: int) -> bytes:
    """All that a stream holds, where that is at most `most` bytes. What is open already may be a pipe."""
    try:
        data = stream.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise UserError(f"{name} cannot be read: it is larger than {_size(max_bytes)}")
    return data


def decode_utf8(data: bytes, name: str) -> str:
    """Bytes as text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not valid UTF-8 (byte {error.start})") from None


def read_text(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a regular file of at most `most` bytes."""
    name = _display_name(file, name)
    return decode_utf8(read_bytes(file, name, max_bytes), name)


def read_lines(
    file: Path, name: str | None = None, *, max_bytes: int, max_line_bytes: int = SMALL_FILE_BYTES
) -> Iterator[bytes]:
    """The lines of a regular file of at most `most` bytes, none longer than `longest` bytes."""
    name = _display_name(file, name)
    with open_file(file, name) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise UserError(f"{name} cannot be read: it is larger than {_size(max_bytes)}")
        number = 0
        while line := stream.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise UserError(f"{name}, line {number}, is longer than {_size(max_line_bytes)}")
            yield line


def parse_json(text: str, name: str) -> Any:
    """A JSON value from text. Raises UserError on what is none: numbers beyond all bounds, NaN and endless nesting
    too."""
    try:
        data = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_float)
    except RecursionError:
        raise UserError(f"{name} is not usable as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{name} is not readable as JSON ({one_line(error)})") from None
    level: list[Any] = [data]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for value in level if isinstance(value, dict | list) for item in _children(value)]
        if not level:
            return data
    raise UserError(f"{name} is not usable as JSON: it is nested too deeply")


def read_object(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds."""
    name = _display_name(file, name)
    data = parse_json(read_text(file, name, max_bytes), name)
    if not isinstance(data, dict):
        raise UserError(f"{name}: not a JSON object")
    return data


def _display_name(file: Path, name: str | None) -> str:
    return _printable(str(file) if name is None else name)


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _children(value: dict[str, Any] | list[Any]) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, dict) else value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{truncated_repr(text)} is too large a number")
    return value


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= SMALL_FILE_BYTES else f"{count} bytes"


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or one_line(error)


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of somebody else's, field by field: each has its type and its bounds, and a UserError names it.

    A field that is null counts as left out. `where`: what stands before a field's name in an error, such as `file: `.
    """

    data: Mapping[str, Any]
    where: str = ""

    def integer(self, name: str, default: int | None = None, *, ge: int = MIN_INT, le: int = MAX_INT) -> int:
        """An integer in least..most; 4.0 is one too. Without a default it must be there."""
        value = _as_int(self._value(name, default))
        if value is None or not ge <= value <= le:
            raise self.error(name, f"be a whole number in {ge}..{le}")
        return value

    def number(self, name: str, default: float | None = None, *, ge: float, le: float) -> float:
        """A number in least..most."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not ge <= value <= le:
            raise self.error(name, f"be a number in {ge:g}..{le:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "be true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """Text. Without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "be text")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of texts; empty if left out."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "be a list of texts")
        return value

    def integers(self, name: str, *, ge: int, le: int) -> list[int]:
        """A list of integers in least..most, or one of them alone; empty if left out."""
        value = self._value(name, [])
        found = [_as_int(item) for item in (value if isinstance(value, list) else [value])]
        if not all(number is not None and ge <= number <= le for number in found):
            raise self.error(name, f"be a whole number in {ge}..{le}, or a list of them")
        return [number for number in found if number is not None]

    def object(self, name: str) -> Fields:
        """An object inside this one; an empty one if left out."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "be an object")
        return Fields(value, f"{self.where}{_field_name(name)}.")

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty if left out."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(name, "be a list of objects")
        return [Fields(item, f"{self.where}{_field_name(name)}[{number}].") for number, item in enumerate(value)]

    def error(self, name: str, rule: str) -> UserError:
        """What to say of a field that breaks a rule."""
        value = self.data.get(name)
        said = f"{self.where}{_field_name(name)}"
        return UserError(f"{said} is missing" if value is None else f"{said} must {rule}, not {truncated_repr(value)}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        return default if value is None else value


def _as_int(value: object) -> int | None:
    """An integer as JSON may write one; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _field_name(name: str) -> str:
    """A field's name as it stands, unless it is one that a person would not write."""
    return name if name.isidentifier() and len(name) <= 80 else truncated_repr(name)
