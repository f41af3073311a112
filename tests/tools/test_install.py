"""`make install`: what it shows while the extension compiles, and what of a failed build."""

from __future__ import annotations

import pytest

from tools.install import MAX_ERROR_LINES, announcement, error_lines, progress, torch_arguments

LOG = """\
  Running command Building editable for swiftspec-llm
  swiftspec: CUDA kernels left out: SWIFTSPEC_CUDA=0
  [1/40] Building CXX object a.o
  [2/40] Building CXX object b.o
"""


def test_progress_is_that_of_ninja() -> None:
    assert progress("") == "configuring"
    assert progress(LOG) == "compiled 2 of 40 files"


def test_the_reason_of_a_failed_build_is_shown() -> None:
    failed = LOG + "FAILED: c.o\n  c.cpp:1:1: error: no\n" + "more\n" * 100 + "pip's own words\n"
    shown = error_lines(failed).splitlines()
    assert shown[:2] == ["FAILED: c.o", "c.cpp:1:1: error: no"] and len(shown) == MAX_ERROR_LINES
    assert error_lines(LOG + "Traceback\nKeyError: 1\n").endswith("KeyError: 1")
    assert error_lines(LOG + "pip\nswiftspec: no C++ compiler found; install g++\nTraceback\n") == (
        "swiftspec: no C++ compiler found; install g++"
    )


@pytest.mark.parametrize(("cores", "minutes"), [(1, 2), (2, 1), (64, 1)])
def test_the_announcement_has_the_expected_time(cores: int, minutes: int) -> None:
    line = announcement(cores, ["torch==2.13.0"], has_gpu=False)
    assert f"about {minutes} min on {cores} cores" in line and "pip installs torch==2.13.0" in line
    assert "CUDA" not in line and "CUDA" in announcement(cores, [], has_gpu=True)


def test_an_installed_torch_is_kept_unless_another_one_is_requested() -> None:
    assert torch_arguments("", "") == []
    assert torch_arguments("torch==2.12.0 --index-url x", "") == ["torch==2.12.0", "--index-url", "x"]
