"""Input validation for files: the only module that reads text or JSON files written outside of SwiftSpec.

It accepts regular files of bounded size, UTF-8, and JSON of bounded depth with finite numbers. Anything else raises
UserError with the name of the file and the reason.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from swiftspec.errors import UserError, truncated_repr

SMALL_FILE_BYTES = 1 << 20  # limit for files written by hand
MAX_FILE_BYTES = 16 << 20  # limit for configs and profiles; well above the usual size
MAX_JSON_DEPTH = 64  # nesting levels
MAX_ERROR_CHARS = 300  # limit of an exception's message that is quoted in another message
MIN_INT, MAX_INT = -(2**63), 2**63 - 1
FILE_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_file(path: str | Path) -> bool:
    """Returns whether the path is a regular file or a link to one; False for a name that the file system does not
    allow."""
    return os.path.isfile(path)  # noqa: PTH113  (pathlib raises on names too long and on unreadable folders)


def is_folder(path: str | Path) -> bool:
    """Returns whether the path is a directory or a link to one."""
    return os.path.isdir(path)  # noqa: PTH112


def expand_user(name: str) -> Path:
    """Expands `~` and `~user` at the start of a path. Raises UserError if the user does not exist or has no home
    directory."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{truncated_repr(name)}: no such user, or no home directory: use an absolute path") from None


def one_line(error: BaseException) -> str:
    """Returns the message of an exception as one printable line of at most MAX_ERROR_CHARS characters, or the name of
    the exception's class if it has no message."""
    words = _printable(" ".join(str(error).split())) or type(error).__name__
    return words if len(words) <= MAX_ERROR_CHARS else words[: MAX_ERROR_CHARS - 3] + "..."


def file_facts(file: Path) -> tuple[int, ...]:
    """Returns attributes of a file that change when its contents change: size, times of modification and status change,
    inode. Raises UserError if the file cannot be accessed."""
    try:
        now = file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino


def open_file(file: Path, name: str | None = None) -> BinaryIO:
    """Opens a regular file for reading. Raises UserError, without blocking, on a pipe, a device or a file that cannot
    be opened. `name`: the file's name in error messages; default its path."""
    name = _display_name(file, name)
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {_reason(error)}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = FILE_KINDS.get(stat.S_IFMT(mode), "a special file")
        raise UserError(f"{name} cannot be read: it is {kind}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Returns the contents of a regular file. Raises UserError if the file cannot be read or is larger than
    `max_bytes`. `name`: as in `open_file`."""
    name = _display_name(file, name)
    with open_file(file, name) as stream:
        return read_stream(stream, name, max_bytes)


def read_stream(stream: BinaryIO, name: str, max_bytes: int) -> bytes:
    """Returns the rest of an open stream, which may be a pipe. Raises UserError if it cannot be read or is larger than
    `max_bytes`. `name`: the stream's name in error messages."""
    try:
        data = stream.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise UserError(f"{name} cannot be read: it is larger than {_size(max_bytes)}")
    return data


def decode_utf8(data: bytes, name: str) -> str:
    """Decodes UTF-8. Raises UserError on invalid bytes. `name`: name of their source in the error message."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not valid UTF-8 (byte {error.start})") from None


def read_text(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Returns the text of a regular UTF-8 file. Raises UserError if the file cannot be read, is not UTF-8, or is larger
    than `max_bytes`. `name`: as in `open_file`."""
    name = _display_name(file, name)
    return decode_utf8(read_bytes(file, name, max_bytes), name)


def write_text(file: Path, text: str) -> None:
    """Writes a file atomically, and its folder if that is missing: a reader sees either the old or the new contents.
    Raises UserError if that fails."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        data = text.encode()
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise UserError(f"{file} cannot be written: {_reason(error)}") from None


def read_lines(
    file: Path, name: str | None = None, *, max_bytes: int, max_line_bytes: int = SMALL_FILE_BYTES
) -> Iterator[bytes]:
    """Yields the lines of a regular file. Raises UserError if the file is larger than `max_bytes` or a line is longer
    than `max_line_bytes`. `name`: as in `open_file`."""
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
    """Parses JSON. Raises UserError on invalid JSON, on NaN and infinity, on numbers too large for a float, and on
    nesting deeper than MAX_JSON_DEPTH. `name`: name of the source in error messages."""
    try:
        data = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_float)
    except RecursionError:
        raise UserError(f"{name} cannot be parsed as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{name} is not valid JSON ({one_line(error)})") from None
    level: list[Any] = [data]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for value in level if isinstance(value, dict | list) for item in _children(value)]
        if not level:
            return data
    raise UserError(f"{name} cannot be parsed as JSON: it is nested too deeply")


def read_object(file: Path, name: str | None = None, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises UserError if the file cannot be read or does not contain a JSON object.
    `name`: as in `open_file`."""
    name = _display_name(file, name)
    data = parse_json(read_text(file, name, max_bytes), name)
    if not isinstance(data, dict):
        raise UserError(f"{name}: not a JSON object")
    return data


@contextmanager
def damage_reported(name: str | Path) -> Iterator[None]:
    """Turns an error of code that computes with values of a file, such as a division by zero, into a UserError that
    calls the file damaged, and puts the file's name before the message of any other UserError. `name`: of the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise UserError(f"{name}: damaged ({one_line(error)}); download it again") from None


def _display_name(file: Path, name: str | None) -> str:
    return _printable(str(file) if name is None else name)


def _printable(text: str) -> str:
    """Replaces non-printable characters, such as terminal control sequences, by `?`."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _children(value: dict[str, Any] | list[Any]) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, dict) else value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a valid number")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {truncated_repr(text)} is too large")
    return value


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= SMALL_FILE_BYTES else f"{count} bytes"


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or one_line(error)


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to the fields of an untrusted JSON object. Raises UserError with the field's name if a field has the
    wrong type or is out of bounds.

    A field that is null counts as missing. `where`: prefix of a field's name in an error message, such as `file: `.
    """

    data: Mapping[str, Any]
    where: str = ""

    def integer(self, name: str, default: int | None = None, *, ge: int = MIN_INT, le: int = MAX_INT) -> int:
        """Returns an integer in `ge`..`le`; 4.0 is accepted as 4. Raises UserError if the field is missing and has no
        default."""
        value = _as_int(self._value(name, default))
        if value is None or not ge <= value <= le:
            raise self.error(name, f"be a whole number in {ge}..{le}")
        return value

    def number(self, name: str, default: float | None = None, *, ge: float, le: float) -> float:
        """Returns a number in `ge`..`le` as a float. Raises UserError if the field is missing and has no default."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not ge <= value <= le:
            raise self.error(name, f"be a number in {ge:g}..{le:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Returns true or false; `default` if the field is missing."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "be true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """Returns a string. Raises UserError if the field is missing and has no default."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "be a string")
        return value

    def strings(self, name: str) -> list[str]:
        """Returns a list of strings; an empty one if the field is missing."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "be a list of strings")
        return value

    def integers(self, name: str, *, ge: int, le: int) -> list[int]:
        """Returns a list of integers in `ge`..`le`; an empty one if the field is missing. A single integer is accepted
        as a list of one."""
        value = self._value(name, [])
        found = [_as_int(item) for item in (value if isinstance(value, list) else [value])]
        if not all(number is not None and ge <= number <= le for number in found):
            raise self.error(name, f"be a whole number in {ge}..{le}, or a list of them")
        return [number for number in found if number is not None]

    def object(self, name: str) -> Fields:
        """Returns a nested object; an empty one if the field is missing."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "be an object")
        return Fields(value, f"{self.where}{_field_name(name)}.")

    def objects(self, name: str) -> list[Fields]:
        """Returns a list of objects; an empty one if the field is missing."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(name, "be a list of objects")
        return [Fields(item, f"{self.where}{_field_name(name)}[{number}].") for number, item in enumerate(value)]

    def error(self, name: str, rule: str) -> UserError:
        """Returns the UserError for a field that is missing or breaks a rule. `rule`: the end of the message "FIELD
        must RULE, not VALUE"."""
        value = self.data.get(name)
        said = f"{self.where}{_field_name(name)}"
        return UserError(f"{said} is missing" if value is None else f"{said} must {rule}, not {truncated_repr(value)}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        return default if value is None else value


def _as_int(value: object) -> int | None:
    """Returns the value as an integer, or None if it is not a whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _field_name(name: str) -> str:
    """Returns the name of a field for a message: unchanged if it is a short identifier, otherwise its truncated
    repr."""
    return name if name.isidentifier() and len(name) <= 80 else truncated_repr(name)
