"""Validation of input files: a file that is not regular, too large, not text or not JSON is refused in one line that
names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swiftspec import file_io
from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import (
    MAX_JSON_DEPTH,
    Fields,
    expand_user,
    is_file,
    is_folder,
    parse_json,
    read_lines,
    read_object,
    read_text,
)


def refusal(file: Path, most: int = 100) -> str:
    with pytest.raises(UserError) as caught:
        read_object(file, max_bytes=most)
    assert str(file) in str(caught.value) and str(caught.value).isprintable()
    return str(caught.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert "it is a pipe" in refusal(tmp_path / "pipe")  # without blocking
    assert "it is a folder" in refusal(tmp_path / "folder")
    assert "it is a device" in refusal(Path("/dev/zero"))
    assert "No such file" in refusal(tmp_path / "none")
    assert "name too long" in refusal(tmp_path / ("x" * 300))
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_object(tmp_path / "link") == {}


def test_impossible_file_names_are_not_an_error(tmp_path: Path) -> None:
    for name in ("x" * 300, "a\0b", "none"):
        assert not is_file(tmp_path / name) and not is_folder(tmp_path / name)
    with pytest.raises(UserError, match="no such user"):
        expand_user("~nosuchuser/x")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * 101, "larger than 100 bytes"),
        (b'{"a": "\xff"}', "not valid UTF-8 (byte 7)"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": NaN}', "NaN is not a valid number"),
        (b'{"a": -Infinity}', "-Infinity is not a valid number"),
        (b'{"a": 1e999}', "number '1e999' is too large"),
    ],
)
def test_valid_contents_of_a_file(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x.json").write_bytes(data)
    assert reason in refusal(tmp_path / "x.json")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1)]
)
def test_excessive_nesting_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="as JSON"):
        parse_json(text, "it")
    assert parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH, "it")


def test_excessive_digits_are_refused() -> None:
    with pytest.raises(UserError, match="not valid JSON") as caught:
        parse_json("9" * 5000, "it")
    assert len(str(caught.value)) < 400


def test_lines_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"ab\ncd\n" + b"e" * 50)
    assert [len(line) for line in read_lines(file, max_bytes=100, max_line_bytes=50)] == [3, 3, 50]
    with pytest.raises(UserError, match="line 3, is longer than 49 bytes"):
        list(read_lines(file, max_bytes=100, max_line_bytes=49))
    with pytest.raises(UserError, match="larger than 55 bytes"):
        list(read_lines(file, max_bytes=55))
    with pytest.raises(UserError, match="cannot be read"):
        read_text(tmp_path / "a\0b")


def test_values_are_shown_on_one_line_and_truncated() -> None:
    assert truncated_repr("a\nb") == "'a\\nb'" and truncated_repr(3.5) == "3.5" and truncated_repr(True) == "True"
    assert truncated_repr("x" * 5000) == "'" + "x" * 59 + "..." + "x" * 9 + "'"
    assert truncated_repr(10**5000) == truncated_repr([10**5000]) == "a number with too many digits"


def test_fields_are_typed_and_bounded() -> None:
    fields = Fields(
        {
            "n": 4.0,
            "half": 0.5,
            "yes": True,
            "word": "w",
            "ids": [1, 2.0],
            "null": None,
            "in": {"x": 1},
            "many": [{"y": 2}],
        },
        "f: ",
    )
    assert fields.integer("n", ge=1, le=4) == 4 and fields.integer("null", 7) == 7
    assert fields.number("half", ge=0, le=1) == 0.5 and fields.number("n", ge=0, le=9) == 4.0
    assert (
        fields.boolean("yes")
        and not fields.boolean("null")
        and fields.string("word") == "w"
        and fields.strings("null") == []
    )
    assert fields.integers("ids", ge=0, le=9) == [1, 2] and fields.integers("n", ge=0, le=9) == [4]
    assert fields.object("in").integer("x") == 1 and fields.objects("many")[0].integer("y") == 2
    bad = {
        "f: half must be a whole number in 1..9, not 0.5": lambda: fields.integer("half", ge=1, le=9),
        "f: n must be a whole number in 5..9, not 4.0": lambda: fields.integer("n", ge=5, le=9),
        "f: yes must be a number in 0..1, not True": lambda: fields.number("yes", ge=0, le=1),
        "f: n must be true or false, not 4.0": lambda: fields.boolean("n"),
        "f: n must be a string, not 4.0": lambda: fields.string("n"),
        "f: word must be a list of strings, not 'w'": lambda: fields.strings("word"),
        "f: ids must be a whole number in 0..1, or a list of them, not [1, 2.0]": lambda: fields.integers(
            "ids", ge=0, le=1
        ),
        "f: ids must be an object, not [1, 2.0]": lambda: fields.object("ids"),
        "f: ids must be a list of objects, not [1, 2.0]": lambda: fields.objects("ids"),
        "f: in.z is missing": lambda: fields.object("in").integer("z"),
        "f: many[0].z is missing": lambda: fields.objects("many")[0].string("z"),
        "f: none is missing": lambda: fields.integer("none"),
    }
    for message, read in bad.items():
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value) == message


def test_an_interrupted_write_leaves_the_old_file_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.json"
    file_io.write_text(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot be written: "):
        file_io.write_text(file, "\ud800")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        file_io.write_text(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
