"""Schemas of profile and trace files (pydantic): types and bounds of all fields.

Code that reads a file after `validate` does not check its fields again. Unknown fields are ignored, except in `emulate`
and `around`. NaN, infinity, and numbers such as 4.0 for integers are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError, truncated_repr

MAX_RANKS = 4096
MAX_TIME_S = 1e9  # bounds durations, speeds, and readings of time.perf_counter, which may count from boot

Count = Annotated[int, Field(ge=0, le=2**31)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
SignedInt = Annotated[int, Field(ge=-(2**31), le=2**31)]
LongText = Annotated[str, Field(max_length=10_000)]
Name = Annotated[str, Field(max_length=200)]
Seconds = Annotated[float, Field(ge=-MAX_TIME_S, le=MAX_TIME_S)]
Positive = Annotated[float, Field(gt=0, le=MAX_TIME_S)]
Span = Annotated[tuple[Seconds, Seconds], Strict(False)]  # [begin, end]; JSON has no tuples
Forward = Annotated[tuple[Seconds, Seconds, Count], Strict(False)]  # [begin, end, rows] of a forward
PARTICLE_FIELDS = ("particles", "smc_draft_tokens", "smc_groups")  # fields of a plan in mode smc
OPTIONAL: Any = None  # default of a field that may be missing but not null
M = TypeVar("M", bound=BaseModel)


class SchemaModel(BaseModel):
    """Base class of all schemas."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def requires_field(name: str, message: str) -> AfterValidator:
    """Returns a validator that rejects an object whose field `name` is null or missing. `message`: the error
    message."""

    def check(part: SchemaModel) -> SchemaModel:
        if getattr(part, name) is None:
            raise ValueError(message)
        return part

    return AfterValidator(check)


class HardwareSchema(SchemaModel):
    kind: Name
    name: Name
    count: Annotated[int, Field(ge=1, le=2**20)]


class StepTimesSchema(SchemaModel):
    points: list[Annotated[tuple[Ranks, Annotated[int, Field(ge=1, le=2**31)], Positive], Strict(False)]] = Field(
        min_length=1
    )


class EmulationSchema(SchemaModel):
    model_config = ConfigDict(extra="forbid")

    target: StepTimesSchema | None = None
    draft: StepTimesSchema | None = None


class KeySchema(SchemaModel):
    hardware: HardwareSchema
    ranks: Ranks
    target: Name
    draft: Name
    dtype: Name
    ops: Name
    emulate: EmulationSchema


def engine_config(plan: Mapping[str, Any]) -> EngineConfig:
    """Returns the engine configuration of a plan, which may lack particle fields. Raises UserError if the plan is
    invalid."""
    particles = {name: plan[name] for name in PARTICLE_FIELDS if plan.get(name) is not None}
    engine = {name: value for name, value in plan.items() if name not in PARTICLE_FIELDS}
    return EngineConfig(**engine, population=PopulationConfig(**particles))


class EngineShape(SchemaModel):
    """The fields of a plan from which an engine is configured: the mode, and the shape of the tree or of the
    population."""

    mode: Name
    verify_batch: int
    draft_leaves: int
    draft_steps: int | None
    calibration: float | None = None
    particles: int | None = None
    smc_draft_tokens: int | None = None
    smc_groups: int | None = None

    @model_validator(mode="after")
    def _check_engine_config(self) -> EngineShape:
        try:
            engine_config(self.model_dump())
        except UserError as error:  # pydantic expects a ValueError
            raise ValueError(str(error)) from None
        return self


class PlanSchema(EngineShape):
    target_tp: Ranks
    draft_tp: Annotated[int, Field(ge=0, le=MAX_RANKS)]


class RunSchema(SchemaModel):
    plan: PlanSchema
    ops: Name
    variation: bool
    speeds: list[Positive]
    sampled_speeds: list[Positive] = []
    tokens_per_round: Positive | None
    rounds: Count
    target_busy: Annotated[float, Field(ge=0, le=MAX_TIME_S)] | None
    steps: Span | None
    dropped: LongText | None

    @model_validator(mode="after")
    def _check_measured_fields(self) -> RunSchema:
        if self.speeds and (self.tokens_per_round is None or self.target_busy is None):
            raise ValueError("a run with speeds requires tokens_per_round and target_busy")
        return self


class StepSchema(SchemaModel):
    side: Literal["target", "draft"]
    tp: Ranks
    rows: Annotated[int, Field(ge=1, le=2**31)]
    seconds: list[Positive] = Field(min_length=1)


class RecordedRounds(SchemaModel):
    plan: Annotated[EngineShape, requires_field("draft_steps", "draft_steps is not set")]
    rounds: list[Annotated[tuple[Count, Count], Strict(False)]]


class TargetTimes(SchemaModel):
    open: Span = OPTIONAL
    verify: Span = OPTIONAL
    forward: Seconds = OPTIONAL
    forwards: list[Forward] = []


class DraftRoundTimes(SchemaModel):
    open: Span = OPTIONAL
    observe: Span = OPTIONAL
    propose: Span = OPTIONAL
    grow: Span = OPTIONAL
    forwards: list[Forward] = []
    nodes: Count = 0
    expanded: Count = 0
    reused: SignedInt = 0
    wasted: SignedInt = 0


class RoundTimeline(SchemaModel):
    """Timeline of one round, which the HTML report draws."""

    wait: Span
    target: Annotated[TargetTimes, requires_field("verify", "the round was not verified")]
    path: list[Count] = Field(min_length=1)
    draft: DraftRoundTimes = OPTIONAL


class OverheadTimes(SchemaModel):
    """Mean seconds outside the forwards in an asynchronous run. A time that was not measured is 0.

    `verify`: per verification; sampling, selecting the accepted path and building the batch.
    `settle`: per round; the target's work between a result and waiting for the next proposal.
    `expand`: per expansion; selecting leaves, adding children and building the mask.
    `answer`: per round; re-rooting the draft tree and selecting the proposal.
    `link`: from sending a proposal on the draft's side to receiving it on the target's side.
    """

    model_config = ConfigDict(extra="forbid")

    verify: Seconds = Field(default=0.0, ge=0)
    settle: Seconds = Field(default=0.0, ge=0)
    expand: Seconds = Field(default=0.0, ge=0)
    answer: Seconds = Field(default=0.0, ge=0)
    link: Seconds = Field(default=0.0, ge=0)


class Orchestration(SchemaModel):
    seconds: Seconds
    share: Seconds


class RunSettings(SchemaModel):
    prompts: Count
    max_tokens: Count
    samplings: list[dict[Name, Any]] = []


class ProfileSchema(SchemaModel):
    """A profile file; store.py documents the fields."""

    swiftspec_profile: int
    key: KeySchema
    environment: dict[Name, LongText]
    settings: RunSettings
    steps: list[StepSchema]
    runs: list[RunSchema]
    rounds: list[RecordedRounds]
    lanes: list[RoundTimeline]
    around: OverheadTimes
    orchestration: Orchestration | None = None
    stopped: LongText | None


class TraceHeader(SchemaModel):
    """The first line of a trace."""

    mode: Literal["ar", "serial", "async", "smc"]
    target_tp: Ranks
    draft_tp: Annotated[int, Field(ge=0, le=MAX_RANKS)]
    verify_batch: Count
    draft_leaves: Count
    draft_steps: Count


class ProposalSchema(SchemaModel):
    tokens: list[Count]
    parents: list[SignedInt]


class TraceRound(SchemaModel):
    """A round of a trace; docs/reference/trace.md documents the fields."""

    request: Count
    round: Count
    tokens: list[Count]
    target: TargetTimes
    draft: DraftRoundTimes = OPTIONAL
    wait: Span = OPTIONAL
    population: Span = OPTIONAL
    proposal: ProposalSchema = OPTIONAL
    path: Annotated[list[Count], Field(min_length=1)] = OPTIONAL

    @model_validator(mode="after")
    def _check_complete(self) -> TraceRound:
        verified = (self.target.verify, self.target.forward, self.proposal, self.path)
        if self.target.verify is not None and None in verified:
            raise ValueError("a verified round requires forward, proposal and path")
        return self


def validate(kind: type[M], data: Mapping[str, Any], name: str) -> None:
    """Raises UserError if `data` does not match the schema `kind`. `name`: name of the file, with which the message
    begins."""
    try:
        kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(
            f"{name} is damaged ({truncated_repr(place, 120)[1:-1]}: {' '.join(first['msg'].split())[:200]})"
        ) from None
