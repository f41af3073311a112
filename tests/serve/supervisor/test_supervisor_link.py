"""Keepers that hear of each other's end."""

from __future__ import annotations

import secrets
from dataclasses import replace

from swiftspec.distributed.launch.launcher import Launched
from swiftspec.serve.supervisor.supervisor_link import link
from tests.support.http import until


def job() -> Launched:
    return Launched(0, 3, 0, 3, "127.0.0.1", 29500, attempt=secrets.token_hex(8))


def test_the_others_hear_how_rank_0_ended() -> None:
    here = job()
    early = link(replace(here, rank=1))
    assert early.look() is None, "nobody is there yet"
    leading, late, stranger = link(here), link(replace(here, rank=2)), link(replace(job(), rank=1))
    for one in (leading, early, late, stranger, leading):
        assert one.look() is None
    leading.close(7)
    assert (early.look(), late.look(), stranger.look()) == (7, 7, None)
    for one in (early, late, stranger):
        one.close(0)


def test_one_that_says_nothing_has_failed() -> None:
    here = job()
    leading, other = link(here), link(replace(here, rank=1))
    assert other.look() is None
    leading._listening.close()  # type: ignore[attr-defined] # as a process that is killed does
    until(lambda: other.look() == 1)


def test_a_name_that_is_taken_troubles_nobody() -> None:
    here = job()
    first, second = link(here), link(here)
    other = link(replace(here, rank=1))
    assert (second.look(), other.look()) == (None, None)
    second.close(1)
    assert other.look() is None
    first.close(0)
    assert other.look() == 0
