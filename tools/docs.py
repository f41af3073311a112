"""Generates the pages of docs/ that are derived from the code, or reports which of them are out of date.

    python -m tools.docs            writes the pages
    python -m tools.docs --check    exit code 1 if a page is out of date

A further page is a function that returns its text, and an entry in PAGES.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swiftspec import capabilities
from swiftspec.cli.arguments import PRECEDENCE, add_run_flags
from swiftspec.runtime.executors.graph import CAPTURED_ROWS, MAX_JOINT_ROWS
from swiftspec.sampling.noise import PositionNoise
from swiftspec.settings.flags import GROUPS, SETTINGS, Flag, flag_name
from swiftspec.settings.json_flags import FIELDS, JSON_FLAGS
from swiftspec.settings.kv_events_config import KvEventsConfig
from swiftspec.settings.settings import env_name
from tools import execution_paths, operator_support, python_reference

ROOT = Path(__file__).resolve().parent.parent
FLAGS_HEAD = f"""\
<!-- Made by `python -m tools.docs`: do not edit. -->
# The flags of `python -m swiftspec.serve`

Every flag but those of a single run is a setting: it can also be given in the YAML file that `--config` names, where
its key is the flag without the dashes in front, such as `top-p: 0.9`. What a container or a secret store sets has an
environment variable, too. {PRECEDENCE}
The flags with a JSON object take single fields as well, such as `--speculative-config.power 2`.
"""

JSON_NOTES = {  # text in front of the fields of a JSON flag
    "kv_events_config": f"""\
vLLM's object: {", ".join(f"`{name}`" for name in KvEventsConfig.model_fields)}.
`endpoint` and `replay_endpoint` are ZeroMQ addresses: `tcp://*:5557` listens, `tcp://HOST:5557` connects. llm-d
requires the topic `kv@POD_IP:PORT@MODEL`, and prefix-aware routers a `block_size` equal to theirs.
""",
    "speculative_config": f"""\
vLLM's object: `method`, {", ".join(f"`{name}`" for name in FIELDS)} and `num_speculative_tokens`. The other fields are
for experiments.
""",
    "override_generation_config": """\
vLLM's object: all sampling parameters by their names or those of generation_config.json. These have no flag:
""",
}
PATHS_HEAD = """\
<!-- Made by `python -m tools.docs`: do not edit. -->
# Which executor runs which request

An *executor* runs the phases of a round on one model: an expansion of the draft tree, a verification of a proposal, or
a round of sequence groups. All executors compute the same; the faster ones support fewer requests. When a request
opens, each of its roles (draft, target, scheduler) selects the first executor that its model can use and that supports
the request, and keeps it to the end. Draft and target may differ. In a group of ranks the leader selects among the
executors that all ranks have.

A request with several of these features runs on the slowest executor among their rows; no executor supports more than a
slower one does. Prefill is always eager and chunked. The tests run the executors with graphs on a CPU, with a stand-in
for the capture; on a GPU, one H100 has run them.

The columns:

- *CPU, native operators*: x86-64 with AVX2 or more, or aarch64, models in bfloat16 or float32, int4 too; one rank or
  several.
- *CUDA operators*: NVIDIA GPUs since Ampere, bfloat16 models, int4 too, with heads of 64 or 128. *Several*: ranks
  of one machine with peer access to each other's memory.
- *`--ops unfused`*: torch's own operators on a GPU, also for models that the CUDA operators do not support. *Several*:
  ranks that communicate through NCCL.
- *everything else*: plain torch on a CPU, and ranks that share a GPU.

Each section has a table of models, too: on which executor a request at a temperature above 0 runs if a model has a
trait, with `--ops auto` on a machine that has native operators, which are the CUDA operators on a GPU. A model with a
trait that these do not compute runs on torch's own operators, and so does one with sizes that they do not support
([operators.md](operators.md)); all its requests are then as in the column of `--ops unfused` or *everything else*. In
expansions the traits are those of the draft, in verifications those of the target, and in rounds of populations those
of either.
"""
MODELS = "### Models\n"
CONFLICTS = """\
## What does not work together

Every combination works that is not in this table, from `swiftspec/capabilities.py`. Flags, options of `LLM`, and
requests in Python, over HTTP and of workers are refused with these messages; in Python without the dashes.
"""
PATHS_NOTES = f"""\
## Exceptions

Some single phases run differently from the request that they belong to:

- Draft trees are expanded without filters and penalties, which change the draft's ranking little; the verification
  applies them. Sampled children (proposal `sample`, `--verify reject`) have filters and penalties.
- Native rounds of mode `smc` need both models whole on one rank, since they read whole distributions; a group of ranks
  runs these rounds eagerly. So does mode `smc` with `smc_exact` above 0.
- A graph of one model's forward holds at most {CAPTURED_ROWS[-1]} rows of a request, and {MAX_JOINT_ROWS} of several; a
  larger forward runs eagerly. Graphs of rounds of sequence groups may hold more.
- A request that runs alone in a server of several has the graphs of a single one. The graphs of concurrent requests
  have not been run on a GPU.
- The graph of expansions starts after the root's expansion, whose batch contains pending tokens. It also needs at least
  two expansions, room for all of them, and a tree of at most {PositionNoise.BLOCK_POSITIONS} levels. Other expansions
  run as graph forwards.
- A verification graph assumes that the top candidates suffice for a filter and flags the rows where they do not. Those
  batches are sampled again outside the graph, from the logits that it left.
- If more than w tokens are pending, the draft prefills them like a prompt.
"""


def paths_page() -> str:
    """Returns the page on execution paths: which executor runs which request, and what the executors are."""
    parts = [PATHS_HEAD]
    head = ("request", *(machine.name for machine in execution_paths.MACHINES))
    for title, step, requests, models in execution_paths.PHASES:
        parts += [f"## {title}\n", table(head, execution_paths.rows(step, requests))]
        reasons = execution_paths.eager_reasons(step, requests)
        if reasons:
            parts.append("Why these run eagerly on machines with faster executors:\n")
            parts.append("".join(f"{_list_item(reason)}\n" for reason in reasons))
        kinds = ("trait of the model", *execution_paths.MACHINE_KINDS)
        parts += [MODELS, table(kinds, execution_paths.model_rows(step, models))]
    parts += [CONFLICTS, table(("where", "message"), _conflict_rows())]
    about = [
        (kind.name, _summary(kind), _code(kind.__module__.replace(".", "/") + ".py"))
        for kind in execution_paths.offered_executors()
    ]
    return "\n".join([*parts, "## The executors\n", table(("name", "description", "file"), about), PATHS_NOTES])


def _conflict_rows() -> Iterable[tuple[str, str]]:
    """Yields the entries of the capability table: where, and the message in which settings are named as flags."""
    for column, entries in capabilities.TABLE.items():
        where = capabilities.FEATURES[column].where or f"with {capabilities.FEATURES[column].title}"
        for row, conflict in entries.items():
            message = capabilities.conflict_text(row, column, conflict)
            yield capabilities.with_labels(where, flag_name), capabilities.with_labels(message, flag_name)


def _list_item(text: str) -> str:
    """Formats an item of a Markdown list."""
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ")


def _summary(kind: type) -> str:
    """Returns the first paragraph of a docstring."""
    return " ".join(str(kind.__doc__).partition("\n\n")[0].split())


def flags_page() -> str:
    """Returns the page on flags, by group: values, default, environment variable."""
    once = [
        (_code(f"{', '.join(action.option_strings)} {action.metavar or ''}".rstrip()), str(action.help))
        for action in add_run_flags(argparse.ArgumentParser(add_help=False))
    ]
    parts = [FLAGS_HEAD, "## a single run\n", table(("flag", "what it does"), once)]
    head = ("flag", "what it does", "values", "default")
    for group in GROUPS:
        rows = [_row(flag) for flag in SETTINGS.values() if flag.setting.group == group and flag.setting.has_flag]
        parts += [f"## {group}\n", table(head, rows)]
    for name in JSON_FLAGS:
        rows = [_row(flag) for flag in SETTINGS.values() if flag.setting.json_flag == name]
        parts += [
            f"## fields of {flag_name(name)}\n",
            JSON_NOTES[name],
            table(("field", *head[1:]), rows) if rows else "",
        ]
    rows = [_row(flag) for flag in SETTINGS.values() if flag.setting.python_only]
    parts += ["## options of `swiftspec.LLM` without a flag\n", table(("option", *head[1:]), rows)]
    return "\n".join(parts)


def _row(flag: Flag) -> tuple[str, ...]:
    name = flag_name(flag.name) if flag.setting.has_flag else flag.name
    if flag.is_boolean:
        shown, values = _code(name), "on or off"
        if flag.setting.has_flag:
            shown += f", {_code('--no-' + name[2:])}"
    elif flag.choices:
        shown, values = _code(name), ", ".join(map(_code, flag.choices))
    else:
        shown, values = (
            _code(f"{name} {flag.metavar}"),
            f"must {flag.setting.rule.text}" if flag.setting.rule.text else "",
        )
    about = str(flag.setting.help)
    if flag.setting.variable:
        about += f" Environment variable: {_code(env_name(flag.name))}."
    return shown, about, values, flag.default_text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(text: str) -> str:
    return f"`{text}`"


def operators_page() -> str:
    """Returns the page on operators: which of them run which model family."""
    guide, families = operator_support.GUIDE, table(operator_support.FAMILY_HEAD, operator_support.family_rows())
    formats = table(operator_support.FORMAT_HEAD, operator_support.format_rows())
    page = [operator_support.PAGE, operator_support.FAMILIES, families, "\n", operator_support.FORMATS, formats]
    return "".join(page).replace("{guide}", guide)


PAGES: dict[str, Callable[[], str]] = {
    "docs/operators.md": operators_page,
    "docs/reference/flags.md": flags_page,
    "docs/paths.md": paths_page,
    "docs/reference/python.md": python_reference.page,
}


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes the pages of docs/ that are derived from the code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = 0
    for name, page in PAGES.items():
        file, text = root / name, page()
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{name} is out of date; run python -m tools.docs")
            stale = 1
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main())
