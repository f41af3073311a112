"""HTML report of a profile: a single file with inline SVG plots, drawn by matplotlib (extra `report`).

python -m bench.profile_report profiles/NAME.json
"""

from __future__ import annotations

import argparse
import html as escaping
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftspec import file_io
from swiftspec.lab import results
from swiftspec.params import SWITCHED_OFF
from swiftspec.profiles import store
from swiftspec.serve.__main__ import run_guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = Mapping[str, Any]
COLOURS = {"ar": "#7f7f7f", "serial": "#d98c00", "async": "#1f6fb4", "smc": "#8a5fb0"}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.5rem}table{border-collapse:collapse;font-size:14px}
td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
tr.best{background:#eef6ee;font-weight:600}tr.dropped{color:#888}p.note{color:#555;font-size:14px}svg{max-width:100%}
"""


def html(profile: Json) -> str:
    """Returns the report of a profile as an HTML page."""
    key, winner = profile["key"], store.best_run(profile)
    machine = f"{key['hardware']['count']} x {key['hardware']['name']}, {key['ranks']} ranks, {key['dtype']}"
    emulated = " Step times are emulated." if any(key["emulate"].values()) else ""
    parts = [
        f"<h1>SwiftSpec profile</h1><p>{_text(machine)}.{emulated} All figures were measured on this machine.</p>",
        ""
        if winner is None
        else f"<p>Recommended: <b>{_text(store.plan_title(winner['plan']))}</b>, "
        f"{store.median_speed(winner):.1f} tokens per second.</p>",
        "" if not profile["stopped"] else f"<p class=note>Stopped early: {_text(profile['stopped'])}.</p>",
        *(f"<p>{_text(line.capitalize())}.</p>" for line in results.format_orchestration(profile)),
        "<h2>Runs</h2>",
        _table(profile, winner),
    ]
    for title, note, draw in FIGURES:
        picture = _svg(profile, draw)
        if picture is not None:
            parts.append(f"<h2>{_text(title)}</h2>{picture}<p class=note>{_text(note)}</p>")
    settings, versions = profile["settings"], ", ".join(f"{k} {v}" for k, v in profile["environment"].items())
    parts.append(
        f"<p class=note>{settings['prompts']} prompts, {settings['max_tokens']} tokens each,"
        f" {_text(_samplings(settings))} (mode smc: temperature 1), speed without prefill; {_text(versions)}</p>"
    )
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>SwiftSpec profile</title><style>{STYLE}</style>"
    return head + "\n".join(parts) + "</html>\n"


def _samplings(settings: Json) -> str:
    """Returns the sampling parameters of the requests, such as `greedy, and with temperature 0.6, top_p 0.9`."""
    names = []
    for each in settings.get("samplings", [])[1:]:
        set_ = {name: value for name, value in each.items() if value != SWITCHED_OFF.get(name)}
        names.append(", and with " + ", ".join(f"{name} {value:g}" for name, value in set_.items()))
    return "greedy" + "".join(names)


def _text(value: object) -> str:
    return escaping.escape(str(value))


def _table(profile: Json, winner: Json | None) -> str:
    rows = []
    for run in sorted(profile["runs"], key=store.median_speed, reverse=True):
        kind = " class=best" if run is winner else " class=dropped" if run["dropped"] else ""
        cells = [store.plan_title(run["plan"]), run["ops"]]
        if run["speeds"]:
            median, least, most = store.median_min_max(run["speeds"])
            sampled = run.get("sampled_speeds")
            cells += [
                f"{median:.1f}",
                f"{least:.1f}–{most:.1f}",
                f"{statistics.median(sampled):.1f}" if sampled else "",
                len(run["speeds"]),
                f"{run['tokens_per_round']:.2f}",
            ]
        else:
            cells += ["", "", "", 0, ""]
        cells.append(store.run_note(run))
        rows.append(f"<tr{kind}>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    names = ("run", "operators", "tok/s", "least–most", "sampled tok/s", "repeats", "tok/round", "note")
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>" + "".join(rows) + "</table>"


def _svg(profile: Json, draw: Callable[[Json, Axes], bool]) -> str | None:
    """Renders the figure that `draw` draws as inline SVG. Returns None if the profile has no data for it."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": draw.__name__}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        if not draw(profile, axes):
            return None
        stream = io.StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _best_of(runs: Sequence[Json]) -> Json | None:
    return max((run for run in runs if run["speeds"]), key=store.median_speed, default=None)


def _default(profile: Json) -> list[Json]:
    """Returns the runs with the default operators, bs and w."""
    return [run for run in profile["runs"] if run["ops"] == "auto" and not run["variation"]]


def draw_splits(profile: Json, axes: Axes) -> bool:
    """Draws the speed of every mode and split at its best d (paper, Figure 9)."""
    groups: dict[str, list[Json]] = {}
    for run in _default(profile):
        plan = run["plan"]
        split = f"{plan['target_tp']}+{plan['draft_tp']}" if plan["mode"] == "async" else str(plan["target_tp"])
        groups.setdefault(f"{plan['mode']}\n{split}", []).append(run)
    bars = [(name, found) for name, runs in groups.items() if (found := _best_of(runs)) is not None]
    for place, (_, run) in enumerate(bars):
        median, least, most = store.median_min_max(run["speeds"])
        axes.bar(place, median, color=COLOURS[run["plan"]["mode"]], width=0.7)
        axes.errorbar(place, median, [[median - least], [most - median]], color="#222", capsize=3)
        d = run["plan"]["draft_steps"]
        axes.annotate(
            f"{median:.0f}" + (f"\nd {d}" if d else ""),
            (place, most),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlabel("mode and ranks (mode async: target + draft)")
    axes.set_ylabel("tokens a second")
    axes.margins(y=0.2)
    return bool(bars)


def compression_curves(profile: Json) -> dict[str, list[tuple[int, float]]]:
    """Returns the points (bs, tokens per round) and (w, tokens per round) of the runs in which the other one has the
    sweep's default, by the label of the curve. Empty without such runs."""
    names = ("mode", "target_tp", "draft_tp", "draft_steps")
    trees = [
        run
        for run in profile["runs"]
        if run["plan"]["mode"] in ("serial", "async")
        and run["ops"] == "auto"
        and run["speeds"]
        and run["plan"].get("calibration") is None
    ]
    varied = next((run["plan"] for run in trees if run["variation"]), None)
    if varied is None:
        return {}
    alike = [run for run in trees if all(run["plan"][name] == varied[name] for name in names)]
    usual = next((run["plan"] for run in alike if not run["variation"]), None)
    if usual is None:
        return {}
    curves = {}
    for name, other, letter, fixed in (
        ("verify_batch", "draft_leaves", "bs", "w"),
        ("draft_leaves", "verify_batch", "w", "bs"),
    ):
        points = {r["plan"][name]: r["tokens_per_round"] for r in alike if r["plan"][other] == usual[other]}
        curves[f"{letter} ({fixed} {usual[other]})"] = sorted(points.items())
    return curves


def draw_compression(profile: Json, axes: Axes) -> bool:
    """Draws the tokens per round against bs at the default w, and against w at the default bs (paper, Figure 2)."""
    curves = compression_curves(profile)
    if not curves:
        return False
    for label, points in curves.items():
        axes.plot(*zip(*points), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlabel("nodes per verification (bs) or leaves per expansion (w)")
    axes.set_ylabel("tokens per target forward")
    axes.legend(frameon=False)
    return True


def draw_step_times(profile: Json, axes: Axes) -> bool:
    """Draws the step times of both models against the TP size (paper, Table 1)."""
    from matplotlib.ticker import LogLocator, NullFormatter

    shades = {"target": ("#9ecae1", "#1f6fb4", "#08306b"), "draft": ("#fdd0a2", "#d98c00", "#7f3b08")}
    for side, colours in shades.items():
        for rows, colour in zip((1, 8, 32), colours):
            points = sorted(
                (step["tp"], *store.median_min_max(1e3 * s for s in step["seconds"]))
                for step in profile["steps"]
                if step["side"] == side and step["rows"] == rows
            )
            if points:
                tp, median, least, most = zip(*points)
                axes.plot(tp, median, color=colour, marker="o", label=f"{side}, {rows} row{'s' * (rows > 1)}")
                axes.fill_between(tp, least, most, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("ranks of the group")
    axes.set_ylabel("milliseconds per forward")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.2)
    axes.set_xticks(sorted({step["tp"] for step in profile["steps"]}))
    if profile["steps"]:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return bool(profile["steps"])


def draw_lanes(profile: Json, axes: Axes) -> bool:
    """Draws the timelines of draft and target over a few rounds of the fastest asynchronous run."""
    lines = profile["lanes"]
    if not lines:
        return False
    zero = lines[0]["wait"][0]

    def bar(lane: int, span: Sequence[float], colour: str, label: str | None) -> None:
        place = [(1e3 * (span[0] - zero), 1e3 * (span[1] - span[0]))]
        axes.broken_barh(place, (lane - 0.3, 0.6), facecolor=colour, edgecolor="white", linewidth=0.6, label=label)

    for number, line in enumerate(lines):
        first = number == 0
        draft = line.get("draft", {})
        bar(1, line["target"]["verify"], "#1f6fb4", "verify" if first else None)
        bar(1, line["wait"], "#f2b6a0", "target waits" if first else None)
        for index, span in enumerate(draft.get("forwards", ())):
            bar(0, span, "#d98c00", "expand" if first and index == 0 else None)
        accepted = len(line["path"]) - 1
        axes.annotate(
            f"+{accepted + 1}",
            (1e3 * (statistics.fmean(line["target"]["verify"]) - zero), 1),
            ha="center",
            va="center",
            color="white",
            fontsize=9,
        )
    axes.set_yticks([0, 1], ["draft", "target"])
    axes.set_xlabel("milliseconds")
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    axes.set_ylim(-0.6, 1.6)
    return True


def draw_ablation(profile: Json, axes: Axes) -> bool:
    """Draws the speed with and without the parallel tree and the fused operators (paper, Figure 8). The base are the
    operators of the runs with others than `auto`: `reference`, or `unfused` on a GPU."""
    base = next((run["ops"] for run in profile["runs"] if run["ops"] != "auto"), "reference")
    systems = {
        "base": ("serial", base),
        "async only": ("async", base),
        "operators only": ("serial", "auto"),
        "both": ("async", "auto"),
    }
    ranks = profile["key"]["ranks"]
    for place, (mode, ops) in enumerate(systems.values()):
        mine = [
            r
            for r in profile["runs"]
            if r["plan"]["mode"] == mode and r["ops"] == ops and (ops == base or not r["variation"])
        ]
        run = _best_of([r for r in mine if store.ranks_of(r["plan"]) == ranks] or mine)
        if run is not None:
            axes.bar(
                place, store.median_speed(run), color=COLOURS[mode], alpha=1.0 if ops == "auto" else 0.5, width=0.6
            )
            axes.annotate(
                f"{store.median_speed(run):.0f}",
                (place, store.median_speed(run)),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    axes.set_xticks(range(4), list(systems))
    axes.set_ylabel("tokens a second")
    axes.margins(y=0.15)
    return any(run["ops"] == base and run["speeds"] for run in profile["runs"])


# (title, caption, function that draws into the axes and returns False if the profile has no data)
FIGURES: tuple[tuple[str, str, Callable[[Json, Axes], bool]], ...] = (
    ("Splits and modes", "Median at the best d; the whiskers show the slowest and the fastest repeat.", draw_splits),
    (
        "Compression ratio",
        "Tokens per target forward against bs and w; the other one has its default.",
        draw_compression,
    ),
    ("Step time", "A forward with sampling, by group size; the band spans minimum to maximum.", draw_step_times),
    ("Timelines", "A few rounds of the best asynchronous run; the numbers are tokens per round.", draw_lanes),
    (
        "Ablation",
        "Asynchronous mode and native operators, alone and together; each at its best d. The base are plain"
        " torch operators, on a GPU those of torch's libraries in CUDA graphs.",
        draw_ablation,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report next to the profile, and returns the exit code."""
    return run_guarded(lambda first: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="profile written by `swiftspec profile`")
    file = parser.parse_args(argv).file
    page = file.with_name(file.name.removesuffix(".json") + ".html")
    file_io.write_text(page, html(store.load(file)))
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
