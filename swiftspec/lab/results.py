"""Formats a profile as a table for the terminal, as CSV, and as settings for `serve`; writes the latter two."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftspec import file_io
from swiftspec.profiles import schema, store

FIELDS = (*store.PLAN_FIELDS, "calibration", *schema.PARTICLE_FIELDS)
COLUMNS = (
    *FIELDS, "ops", "tokens_per_second", "least", "most", "sampled_tokens_per_second", "repeats", "tokens_per_round",
    "target_busy", "verification_ms", "expansion_ms", "dropped",
)  # fmt: skip


def write_outputs(profile: Mapping[str, Any], file: Path) -> Iterator[Path]:
    """Writes the CSV and the fastest plan as YAML settings next to a profile's JSON file `file`.

    Yields `file`, then the path of each file after it is written. There are no settings if no exact run on all ranks
    was measured.
    """
    yield file
    base = file.with_suffix("")
    table_file = base.with_suffix(".csv") if "." not in base.name else base.with_name(base.name + ".csv")
    file_io.write_text(table_file, as_csv(profile))
    yield table_file
    winner = store.best_run(profile)
    if winner is not None:
        settings = base.with_name(base.name + ".best.yaml")
        file_io.write_text(settings, as_yaml(winner, file.name))
        yield settings


def as_csv(profile: Mapping[str, Any]) -> str:
    """Formats the runs as CSV, one line per run."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(COLUMNS)
    for run in profile["runs"]:
        plan, times = run["plan"], run["steps"] or (None, None)
        speeds = store.median_min_max(run["speeds"]) if run["speeds"] else (None, None, None)
        sampled = statistics.median(run["sampled_speeds"]) if run.get("sampled_speeds") else None
        shape, milliseconds = (plan.get(name) for name in FIELDS), (None if t is None else 1e3 * t for t in times)
        measured = *speeds, sampled, len(run["speeds"]), run["tokens_per_round"], run["target_busy"]
        writer.writerow([*shape, run["ops"], *measured, *milliseconds, run["dropped"]])
    return stream.getvalue()


def as_yaml(run: Mapping[str, Any], source: str) -> str:
    """Formats the plan of a run as YAML for `serve --config`. `source`: name of its profile, for the comment."""
    settings = store.plan_settings(run["plan"])
    count = len(run["speeds"])
    lines = [f"# {source}: {store.median_speed(run):.1f} tokens per second, {count} repeat{'s' if count > 1 else ''}"]
    return "\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in settings.items())]) + "\n"


def format_profile(profile: Mapping[str, Any]) -> str:
    """Formats the runs as an aligned table, fastest first, and marks the recommended one with a star."""
    winner = store.best_run(profile)
    rows = [("", "run", "ops", "tok/s", "least..most", "tok/round", "busy", "")]
    for run in sorted(profile["runs"], key=store.median_speed, reverse=True):
        if not run["speeds"]:
            rows.append(("", store.plan_title(run["plan"]), run["ops"], "-", "", "", "", store.run_note(run)))
            continue
        median, least, most = store.median_min_max(run["speeds"])
        rows.append(
            (
                "*" if run is winner else "",
                store.plan_title(run["plan"]),
                run["ops"],
                f"{median:.1f}",
                f"{least:.1f}..{most:.1f}",
                f"{run['tokens_per_round']:.2f}",
                f"{run['target_busy']:.2f}",
                store.run_note(run),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *format_orchestration(profile)])


def format_orchestration(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line with the host overhead per round of the fastest asynchronous run. Yields nothing if the profile has
    none, as without emulated step times."""
    cost = profile.get("orchestration")
    if cost is not None:
        beyond = f"{1e3 * cost['seconds']:.3f} ms ({cost['share']:.1%})"
        yield f"host overhead per round of the best async run: {beyond}"
