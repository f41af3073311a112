"""Profile files: one JSON file per machine and model pair, written atomically, from which `serve` selects its plan.

A profile is a JSON object:

    swiftspec_profile   version of this format
    key                 hardware, ranks, models, dtype, operators and emulation (ProfileKey): the profile is used only
                        where all of them are equal
    environment         versions of Python and torch, and the operating system; for information only
    settings            number of prompts, tokens per prompt and repeats; `samplings`: the sampling parameters that each
                        prompt is decoded with, except in mode smc; greedy if the field is missing
    steps               {side, tp, rows, seconds: [one per repeat]}: step times of one model on a group of tp ranks, for
                        forwards over `rows` rows
    runs                {plan, ops, variation, speeds, tokens_per_round, rounds, target_busy, steps, dropped}, see below
    rounds              {plan, rounds: [[accepted draft tokens, expansions on the critical path], ...]}: recorded rounds
                        from which `bench.prediction.predictor` predicts speeds; deterministic, the same on any machine
    lanes               trace lines of a few rounds of the fastest asynchronous run, for the timelines of the report
    around              seconds outside the forwards in that run; see OverheadTimes in schema.py
    orchestration       with emulated step times: {seconds, share}, the median seconds per round of that run that the
                        emulated step times do not account for, and their share of the median round; else null
    stopped             why the sweep ended early, or null

Fields of a run:

    plan                mode, split and tree shape; `calibration`, if it is not the default; in mode smc also the
                        particles
    ops                 operators (`--ops`)
    variation           whether the plan is a variation of the fastest plan, measured once after the main part of the
                        sweep
    speeds              tokens per second after the prefill, one per repeat, over the requests with all samplings
    sampled_speeds      the same over the requests that are not greedy; missing if there are none
    tokens_per_round    tokens per round in the last repeat
    rounds              number of rounds in the last repeat
    target_busy         share of the last repeat's decode time that the target spent in forwards
    steps               mode async: [seconds per verification, seconds per expansion]; null in other modes
    dropped             why the plan was not measured, or not measured again; else null
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swiftspec import file_io
from swiftspec.builder.hardware import cpu_name
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.fingerprint import fingerprint
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.profiles import schema

Json = dict[str, Any]
VERSION = 1
PARTIAL_SUFFIX = ".partial.json"  # of the file of an unfinished sweep, which serve does not read
SPLIT_FIELDS = ("target_tp", "draft_tp")
TREE_FIELDS = ("verify_batch", "draft_leaves", "draft_steps")
PLAN_FIELDS = ("mode", *SPLIT_FIELDS, *TREE_FIELDS)  # fields of a plan without those for particles
EXACT_MODES = ("ar", "serial", "async")  # modes whose output is exact


def hardware(device: str) -> Json:
    """Returns kind, name and number of the devices that step times depend on. `device`: "cuda" or "cpu"."""
    if device == "cuda":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {"kind": "cpu", "name": cpu_name(), "count": os.cpu_count() or 1}


class NotAProfile(UserError):
    """The file is valid JSON, but has no field `swiftspec_profile`."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a profile: its measurements are valid only where all fields are equal."""

    hardware: Json
    ranks: int
    target: str  # fingerprints of the model directories
    draft: str
    dtype: str
    ops: str
    emulate: Json

    @staticmethod
    def of(
        device: str, ranks: int, target: Path, draft: Path, dtype: str, ops: str, emulate: StepTimeEmulation | None
    ) -> ProfileKey:
        """Returns the key of this machine with the given models and options. `emulate`: step times; None: not
        emulated."""
        paced = json.loads(json.dumps(asdict(emulate or StepTimeEmulation())))  # normalised as if read from a file
        return ProfileKey(
            hardware=hardware(device),
            ranks=ranks,
            target=fingerprint(target),
            draft=fingerprint(draft),
            dtype=dtype,
            ops=ops,
            emulate=paced,
        )

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """Returns why a profile with the key `other` cannot be used with this key; None if it can."""
        mine = asdict(self)
        if (mine["target"], mine["draft"]) != (other.get("target"), other.get("draft")):
            return "it was measured with another pair of models"
        if mine["hardware"] != other.get("hardware"):
            theirs = other.get("hardware") or {}
            name = f"{theirs.get('count')} x {theirs.get('name')}"
            return (
                f"it was measured on another machine ({name}, not {self.hardware['count']} x {self.hardware['name']})"
            )
        for name in ("ranks", "dtype", "ops", "emulate"):
            if mine[name] != other.get(name):
                here = "" if name == "emulate" else f" ({other.get(name)}, not {mine[name]})"
                return f"it was measured with a different value of {name}{here}"
        return None


def environment() -> Json:
    """Returns the versions of Python and torch, and the operating system."""
    system = f"{platform.system()} {platform.machine()}"
    return {"python": platform.python_version(), "torch": torch.__version__, "system": system}


def file_stem(key: ProfileKey, model: str) -> str:
    """Returns the file name of a profile without its suffix. `model`: name of the target."""
    machine = re.sub(r"[^a-z0-9]+", "-", f"{key.hardware['count']}x-{key.hardware['name']}".lower()).strip("-")
    model = re.sub(r"[^A-Za-z0-9.]+", "-", model)
    emulated = "-emulated" if any(key.emulate.values()) else ""
    return f"{machine}-r{key.ranks}-{model}-{(key.target + key.draft)[:4]}{key.draft[:4]}{emulated}"


def load(file: Path) -> Json:
    """Loads and validates a profile (schema.py).

    Raises NotAProfile if the file is JSON but not a profile, UserError if it cannot be read, is damaged or has another
    version.
    """
    again = "measure again with `python -m swiftspec.profile`"
    text = file_io.read_text(file, f"profile {file}")
    try:
        data = file_io.parse_json(text, "it")
    except UserError as error:
        raise UserError(f"profile {file} is damaged ({error}): {again}") from None
    if not isinstance(data, dict) or "swiftspec_profile" not in data:
        raise NotAProfile(f"{file} is not a profile: create one with `python -m swiftspec.profile`")
    version = data["swiftspec_profile"]
    if version != VERSION:
        raise UserError(f"profile {file} has version {truncated_repr(version)}, not {VERSION}: {again}")
    try:
        schema.validate(schema.ProfileSchema, data, f"profile {file}")
    except UserError as error:
        raise UserError(f"{error}: {again}") from None
    if not file.name.endswith(PARTIAL_SUFFIX) and not all(run["speeds"] or run["dropped"] for run in data["runs"]):
        raise UserError(f"profile {file} is damaged (a run has no speeds and is not dropped): {again}")
    return data


def median_speed(run: Mapping[str, Any]) -> float:
    """Returns the median speed of a run over its repeats, in tokens per second; 0 if the run was not measured."""
    return statistics.median(run["speeds"]) if run["speeds"] else 0.0


def median_min_max(values: Iterable[float]) -> tuple[float, float, float]:
    """Returns (median, minimum, maximum) of at least one value."""
    values = list(values)
    return statistics.median(values), min(values), max(values)


def best_run(profile: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> Json | None:
    """Returns the fastest run that uses all ranks and the profile's operators; None if there is none.

    `wanted`: fields that the run's plan must have, such as `{"draft_leaves": 8}`. Only modes with exact output are
    considered, unless `wanted` names a mode.
    """
    ranks, ops = profile["key"]["ranks"], profile["key"]["ops"]
    runs = [
        run
        for run in profile["runs"]
        if run["plan"]["mode"] in (EXACT_MODES if wanted is None or "mode" not in wanted else (wanted["mode"],))
        and run["speeds"]
        and run["ops"] == ops
        and ranks_of(run["plan"]) == ranks
        and all(run["plan"][name] == value for name, value in (wanted or {}).items())
    ]
    return max(runs, key=median_speed, default=None)


def plan_settings(plan: Mapping[str, Any]) -> Json:
    """Returns the `serve` settings of a plan: the fields that its mode uses, without those that are None."""
    names = ("mode", "target_tp") if plan["mode"] == "ar" else PLAN_FIELDS
    own_group = plan["mode"] == "async"  # in other modes draft_tp follows from target_tp
    found = {name: plan[name] for name in names if plan[name] is not None and (own_group or name != "draft_tp")}
    calibration = plan.get("calibration")
    return found if calibration is None else found | {"calibration": calibration}


def ranks_of(plan: Mapping[str, Any]) -> int:
    """Returns the number of ranks that a plan uses."""
    return plan["target_tp"] + (plan["draft_tp"] if plan["mode"] == "async" else 0)


def plan_title(plan: Mapping[str, Any]) -> str:
    """Returns a title such as `async 3+1 bs 8 w 8 d 4 c 0.7`: mode, ranks, tree shape and calibration. d and c are left
    out if they are None."""
    split = f"{plan['target_tp']}+{plan['draft_tp']}" if plan["mode"] == "async" else str(plan["target_tp"])
    if plan["mode"] == "smc":
        words = zip(("N", "K", "G"), schema.PARTICLE_FIELDS, strict=True)
        return " ".join([f"smc {split}", *(f"{letter} {plan[name]}" for letter, name in words if plan.get(name))])
    if plan["mode"] == "ar":
        return f"ar {split}"
    d = "" if plan["draft_steps"] is None else f" d {plan['draft_steps']}"
    c = "" if plan.get("calibration") is None else f" c {plan['calibration']:g}"
    return f"{plan['mode']} {split} bs {plan['verify_batch']} w {plan['draft_leaves']}{d}{c}"


def run_note(run: Mapping[str, Any]) -> str:
    """Returns why a run was dropped, or that its text is approximate; empty for other runs."""
    return run["dropped"] or ("approximate" if run["plan"]["mode"] == "smc" else "")


def find(folder: Path, key: ProfileKey) -> tuple[Json | None, Path | None, list[str]]:
    """Returns (profile, file, []) for the profile in `folder` whose key equals `key`. If there is none, returns (None,
    None, reasons), one reason for each file that cannot be read or that is a profile of the same model pair with
    another key.

    Profiles with emulated step times give a reason only if `key` has emulated step times. Files of unfinished sweeps
    and JSON files that are not profiles give none.
    """
    reasons = []
    for file in sorted(folder.glob("*.json")):
        if file.name.endswith(PARTIAL_SUFFIX):
            continue
        try:
            profile = load(file)
        except NotAProfile:
            continue
        except UserError as error:
            reasons.append(str(error))
            continue
        reason = key.difference(profile["key"])
        if reason is None:
            return profile, file, []
        emulated = any(profile["key"]["emulate"].values()) and not any(key.emulate.values())
        if "another pair" not in reason and not emulated:
            reasons.append(f"{file} is not used: {reason}")
    return None, None, reasons
