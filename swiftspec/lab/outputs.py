"""Output files of a sweep in addition to its JSON: CSV, settings for `serve`, HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftspec import file_io
from swiftspec.lab import html_report, results
from swiftspec.profiles import store


def write_outputs(profile: Mapping[str, Any], file: Path) -> Iterator[Path]:
    """Writes the CSV, the fastest plan as YAML settings, and the HTML report of a profile next to its JSON file `file`.

    Yields `file`, then the path of each file after it is written. There are no settings if no exact run on all ranks
    was measured. Raises UserError instead of writing the report if matplotlib is not installed.
    """
    yield file
    base = file.with_suffix("")
    table_file = base.with_suffix(".csv") if "." not in base.name else base.with_name(base.name + ".csv")
    file_io.write_text(table_file, results.as_csv(profile))
    yield table_file
    winner = store.best_run(profile)
    if winner is not None:
        settings = base.with_name(base.name + ".best.yaml")
        file_io.write_text(settings, results.as_yaml(winner, file.name))
        yield settings
    page = base.with_name(base.name + ".html")
    file_io.write_text(page, html_report.html(profile))
    yield page
