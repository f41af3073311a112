"""Supervisors that are notified of the end of rank 0."""

from __future__ import annotations

import secrets
from dataclasses import replace

from swiftspec.distributed.launch.job_link import job_link
from swiftspec.distributed.launch.launched_rank import LaunchedRank
from tests.support.http import until


def job() -> LaunchedRank:
    return LaunchedRank(0, 3, 0, 3, "127.0.0.1", 29500, attempt=secrets.token_hex(8))


def test_the_other_supervisors_receive_the_exit_of_rank_0() -> None:
    link = job()
    early = job_link(replace(link, rank=1))
    assert early.poll_exit_code() is None, "nobody is there yet"
    leading, late, stranger = job_link(link), job_link(replace(link, rank=2)), job_link(replace(job(), rank=1))
    for one in (leading, early, late, stranger, leading):
        assert one.poll_exit_code() is None
    leading.close(7)
    assert (early.poll_exit_code(), late.poll_exit_code(), stranger.poll_exit_code()) == (7, 7, None)
    for one in (early, late, stranger):
        one.close(0)


def test_a_process_without_output_has_failed() -> None:
    link = job()
    leading, other = job_link(link), job_link(replace(link, rank=1))
    assert other.poll_exit_code() is None
    leading._listening.close()  # type: ignore[attr-defined] # as a process that is killed does
    until(lambda: other.poll_exit_code() == 1)


def test_a_taken_segment_name_is_skipped() -> None:
    link = job()
    first, second = job_link(link), job_link(link)
    other = job_link(replace(link, rank=1))
    assert (second.poll_exit_code(), other.poll_exit_code()) == (None, None)
    second.close(1)
    assert other.poll_exit_code() is None
    first.close(0)
    assert other.poll_exit_code() == 0
