"""Writes what a sweep leaves besides its JSON: a CSV, the settings for serve, the HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftspec.lab import html_report, results
from swiftspec.profiles import store


def write_outputs(profile: Mapping[str, Any], file: Path) -> Iterator[Path]:
    """Writes CSV, settings and report beside `file` and names them. Without matplotlib there is no report, and the last
    line says so, as a UserError."""
    yield file
    base = file.with_suffix("")
    table_file = base.with_suffix(".csv") if "." not in base.name else base.with_name(base.name + ".csv")
    store.save(table_file, results.as_csv(profile))
    yield table_file
    winner = store.best_run(profile)
    if winner is not None:
        settings = base.with_name(base.name + ".best.yaml")
        store.save(settings, results.as_yaml(winner, file.name))
        yield settings
    page = base.with_name(base.name + ".html")
    store.save(page, html_report.html(profile))
    yield page
