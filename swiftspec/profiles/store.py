"""Profiles on disk: one JSON file per hardware and model pair, written atomically, with the plan that it recommends.

A profile is a JSON object:

    swiftspec_profile   version of this layout
    key                 must be equal where the profile is used: hardware, ranks, models, dtype, operators, emulation
    environment         versions and names, for information only
    settings            prompts, tokens and repeats of the runs
    steps               {side, tp, rows, seconds: [one per repeat]}: forwards of one model on a group of tp ranks
    runs                {plan (in mode smc with its particles), ops, speeds: [tokens per second after the prefill, one
                        per repeat], tokens_per_round, rounds, target_busy, steps: [verification, expansion] or null,
                        dropped: reason or null}
    rounds              {plan, rounds: [[accepted draft tokens, expansions on the critical path], ...]}: input of the
                        predictor; deterministic, the same on any machine
    lanes               lines of a trace: a few rounds of the best asynchronous run
    around              seconds per round outside the forwards of that run; see OverheadTimes in schema.py
    orchestration       of that run with emulated step times: {seconds, share} of the median round beyond them, or null
    stopped             reason for an early end, or null
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
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.fingerprint import fingerprint
from swiftspec.observe.step_time_emulation import StepTimeEmulation
from swiftspec.profiles import schema

Json = dict[str, Any]
VERSION = 1
PARTIAL_SUFFIX = ".partial.json"  # an unfinished sweep, which serve does not read
SPLIT_FIELDS = ("target_tp", "draft_tp")
TREE_FIELDS = ("verify_batch", "draft_leaves", "draft_steps")
PLAN_FIELDS = ("mode", *SPLIT_FIELDS, *TREE_FIELDS)  # engine settings in the plan of a run
EXACT_MODES = ("ar", "serial", "async")  # modes whose output is exact


def hardware(device: str) -> Json:
    """The hardware that step times depend on."""
    if device == "cuda":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {"kind": "cpu", "name": _cpu_name(), "count": os.cpu_count() or 1}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class NotAProfile(UserError):
    """The file is JSON, but not a profile."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a profile: its measurements are valid only if all fields are equal."""

    hardware: Json
    ranks: int
    target: str  # fingerprints
    draft: str
    dtype: str
    ops: str
    emulate: Json

    @staticmethod
    def of(
        device: str, ranks: int, target: Path, draft: Path, dtype: str, ops: str, emulate: StepTimeEmulation | None
    ) -> ProfileKey:
        """The key of a run on this machine."""
        paced = json.loads(json.dumps(asdict(emulate or StepTimeEmulation())))  # normalised as if read from a file
        return ProfileKey(hardware(device), ranks, fingerprint(target), fingerprint(draft), dtype, ops, paced)

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The reason why a profile with the key `other` does not match this key; None if it matches."""
        mine = asdict(self)
        if (mine["target"], mine["draft"]) != (other.get("target"), other.get("draft")):
            return "it is of another pair of models"
        if mine["hardware"] != other.get("hardware"):
            theirs = other.get("hardware") or {}
            name = f"{theirs.get('count')} x {theirs.get('name')}"
            return f"it is of another machine ({name}; this is {self.hardware['count']} x {self.hardware['name']})"
        for name in ("ranks", "dtype", "ops", "emulate"):
            if mine[name] != other.get(name):
                here = "" if name == "emulate" else f" {other.get(name)}, not {mine[name]}"
                return f"it was measured with other {name}{here}"
        return None


def environment() -> Json:
    """Versions, for information only."""
    system = f"{platform.system()} {platform.machine()}"
    return {"python": platform.python_version(), "torch": torch.__version__, "system": system}


def file_stem(key: ProfileKey, model: str) -> str:
    """File name of a profile, without its suffix."""
    machine = re.sub(r"[^a-z0-9]+", "-", f"{key.hardware['count']}x-{key.hardware['name']}".lower()).strip("-")
    model = re.sub(r"[^A-Za-z0-9.]+", "-", model)
    emulated = "-emulated" if any(key.emulate.values()) else ""
    return f"{machine}-r{key.ranks}-{model}-{(key.target + key.draft)[:4]}{key.draft[:4]}{emulated}"


def load(file: Path) -> Json:
    """Loads and validates a profile (schema.py). Raises UserError if it is damaged, outdated or not a profile."""
    again = "measure again with `python -m swiftspec.profile`"
    text = file_io.read_text(file, f"profile {file}")
    try:
        data = file_io.parse_json(text, "it")
    except UserError as error:
        raise UserError(f"profile {file} is damaged ({error}): {again}") from None
    if not isinstance(data, dict) or "swiftspec_profile" not in data:
        raise NotAProfile(f"{file} is no profile: make one with `python -m swiftspec.profile`")
    version = data["swiftspec_profile"]
    if version != VERSION:
        raise UserError(
            f"profile {file} has version {truncated_repr(version)}, this program reads {VERSION}: measure again"
        )
    try:
        schema.validate(schema.ProfileSchema, data, f"profile {file}")
    except UserError as error:
        raise UserError(f"{error}: {again}") from None
    if not file.name.endswith(PARTIAL_SUFFIX) and not all(run["speeds"] or run["dropped"] for run in data["runs"]):
        raise UserError(f"profile {file} is damaged (a run without speeds, and not dropped): {again}")
    return data


def save(file: Path, text: str) -> None:
    """Writes a file atomically: a reader sees either the old or the new contents. Raises UserError."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


def median_speed(run: Mapping[str, Any]) -> float:
    """Tokens per second: the median over the repeats, or 0 without any."""
    return statistics.median(run["speeds"]) if run["speeds"] else 0.0


def median_min_max(values: Iterable[float]) -> tuple[float, float, float]:
    """(median, minimum, maximum)."""
    values = list(values)
    return statistics.median(values), min(values), max(values)


def best_run(profile: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> Json | None:
    """The fastest exact run with all ranks and the default operators. `wanted`: values that its plan must have."""
    ranks, ops = profile["key"]["ranks"], profile["key"]["ops"]
    runs = [
        run for run in profile["runs"]
        if run["plan"]["mode"] in (EXACT_MODES if wanted is None or "mode" not in wanted else (wanted["mode"],))
        and run["speeds"] and run["ops"] == ops and ranks_of(run["plan"]) == ranks
        and all(run["plan"][name] == value for name, value in (wanted or {}).items())
    ]  # fmt: skip
    return max(runs, key=median_speed, default=None)


def plan_settings(plan: Mapping[str, Any]) -> Json:
    """The `serve` settings of a plan: those that its mode uses, without undetermined ones."""
    names = ("mode", "target_tp") if plan["mode"] == "ar" else PLAN_FIELDS
    own_group = plan["mode"] == "async"  # the draft's group; otherwise its size follows from the target's
    return {name: plan[name] for name in names if plan[name] is not None and (own_group or name != "draft_tp")}


def ranks_of(plan: Mapping[str, Any]) -> int:
    """Number of ranks of a plan."""
    return plan["target_tp"] + (plan["draft_tp"] if plan["mode"] == "async" else 0)


def plan_title(plan: Mapping[str, Any]) -> str:
    """Title such as `async 3+1 bs 8 w 8 d 4`; without d if it is undetermined."""
    split = f"{plan['target_tp']}+{plan['draft_tp']}" if plan["mode"] == "async" else str(plan["target_tp"])
    if plan["mode"] == "smc":
        words = zip(("N", "K", "G"), schema.PARTICLE_FIELDS, strict=True)
        return " ".join([f"smc {split}", *(f"{letter} {plan[name]}" for letter, name in words if plan.get(name))])
    if plan["mode"] == "ar":
        return f"ar {split}"
    d = "" if plan["draft_steps"] is None else f" d {plan['draft_steps']}"
    return f"{plan['mode']} {split} bs {plan['verify_batch']} w {plan['draft_leaves']}{d}"


def find(folder: Path, key: ProfileKey) -> tuple[Json | None, Path | None, list[str]]:
    """Returns the profile in `folder` for this key, and its file; otherwise the reasons why the profiles of the same
    pair do not match. Skips files that are not profiles and, unless step times are emulated, profiles with emulated
    step times."""
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
