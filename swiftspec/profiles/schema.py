"""What a profile and a trace hold, field by field: type and bounds. Whatever reads one can rely on them.

A field more is no harm. Numbers are finite, and whole numbers stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import UserError, shown

MOST_RANKS = 4096
LONGEST = 1e9  # seconds; of a clock that began with the machine, too

Count = Annotated[int, Field(ge=0, le=2**31)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Whole = Annotated[int, Field(ge=-(2**31), le=2**31)]
Word = Annotated[str, Field(max_length=10_000)]
Name = Annotated[str, Field(max_length=200)]
Seconds = Annotated[float, Field(ge=-LONGEST, le=LONGEST)]
Positive = Annotated[float, Field(gt=0, le=LONGEST)]
Span = Annotated[tuple[Seconds, Seconds], Strict(False)]  # [begin, end]; JSON knows lists only
Forward = Annotated[tuple[Seconds, Seconds, Count], Strict(False)]  # begin, end, rows
PARTICLES = ("particles", "smc_draft_tokens", "smc_groups")  # of a plan in mode smc
LEFT_OUT: Any = None  # what of a round may be missing; where it stands it is not null
M = TypeVar("M", bound=BaseModel)


class Part(BaseModel):
    """An object of the file."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def has(name: str, otherwise: str) -> AfterValidator:
    """Refuses a part whose field of that name is null or missing."""

    def check(part: Part) -> Part:
        if getattr(part, name) is None:
            raise ValueError(otherwise)
        return part

    return AfterValidator(check)


class Hardware(Part):
    kind: Name
    name: Name
    count: Annotated[int, Field(ge=1, le=2**20)]


class Times(Part):
    points: list[Annotated[tuple[Ranks, Annotated[int, Field(ge=1, le=2**31)], Positive], Strict(False)]] = Field(
        min_length=1
    )


class Emulated(Part):
    model_config = ConfigDict(extra="forbid")

    target: Times | None = None
    draft: Times | None = None


class Key(Part):
    hardware: Hardware
    ranks: Ranks
    target: Name
    draft: Name
    dtype: Name
    ops: Name
    emulate: Emulated


def engine_of(plan: Mapping[str, Any]) -> EngineConfig:
    """The engine of a plan, whose particles may be left out. Raises UserError where it makes none."""
    particles = {name: plan[name] for name in PARTICLES if plan.get(name) is not None}
    engine = {name: value for name, value in plan.items() if name not in PARTICLES}
    return EngineConfig(**engine, population=PopulationConfig(**particles))


class Shape(Part):
    """The mode and the tree or the particles of a plan: what makes an engine."""

    mode: Name
    verify_batch: int
    draft_leaves: int
    draft_steps: int | None
    particles: int | None = None
    smc_draft_tokens: int | None = None
    smc_groups: int | None = None

    @model_validator(mode="after")
    def _makes_an_engine(self) -> Shape:
        try:
            engine_of(self.model_dump())
        except UserError as error:  # pydantic wants a ValueError
            raise ValueError(str(error)) from None
        return self


class Plan(Shape):
    target_tp: Ranks
    draft_tp: Annotated[int, Field(ge=0, le=MOST_RANKS)]


class Run(Part):
    plan: Plan
    ops: Name
    variation: bool
    speeds: list[Positive]
    tokens_per_round: Positive | None
    rounds: Count
    target_busy: Annotated[float, Field(ge=0, le=LONGEST)] | None
    steps: Span | None
    dropped: Word | None

    @model_validator(mode="after")
    def _tells_of_its_speeds(self) -> Run:
        if self.speeds and (self.tokens_per_round is None or self.target_busy is None):
            raise ValueError("a run with speeds has tokens_per_round and target_busy")
        return self


class Step(Part):
    side: Literal["target", "draft"]
    tp: Ranks
    rows: Annotated[int, Field(ge=1, le=2**31)]
    seconds: list[Positive] = Field(min_length=1)


class Recorded(Part):
    plan: Annotated[Shape, has("draft_steps", "its draft_steps is open")]
    rounds: list[Annotated[tuple[Count, Count], Strict(False)]]


class TargetLane(Part):
    open: Span = LEFT_OUT
    verify: Span = LEFT_OUT
    forward: Seconds = LEFT_OUT
    forwards: list[Forward] = []


class DraftLane(Part):
    open: Span = LEFT_OUT
    observe: Span = LEFT_OUT
    propose: Span = LEFT_OUT
    grow: Span = LEFT_OUT
    forwards: list[Forward] = []
    nodes: Count = 0
    expanded: Count = 0
    reused: Whole = 0
    wasted: Whole = 0


class Lane(Part):
    """A round as it went, drawn in the report."""

    wait: Span
    target: Annotated[TargetLane, has("verify", "the round was not verified")]
    path: list[Count] = Field(min_length=1)
    draft: DraftLane = LEFT_OUT


class Around(Part):
    model_config = ConfigDict(extra="forbid")

    verify: Seconds = Field(default=0.0, ge=0)
    settle: Seconds = Field(default=0.0, ge=0)
    expand: Seconds = Field(default=0.0, ge=0)
    answer: Seconds = Field(default=0.0, ge=0)
    link: Seconds = Field(default=0.0, ge=0)


class Orchestration(Part):
    seconds: Seconds
    share: Seconds


class Wanted(Part):
    prompts: Count
    max_tokens: Count


class Profile(Part):
    """See store.py, which says what the parts mean."""

    swiftspec_profile: int
    key: Key
    environment: dict[Name, Word]
    settings: Wanted
    steps: list[Step]
    runs: list[Run]
    rounds: list[Recorded]
    lanes: list[Lane]
    around: Around
    orchestration: Orchestration | None = None
    stopped: Word | None


class Head(Part):
    """The first line of a trace."""

    mode: Literal["ar", "serial", "async", "smc"]
    target_tp: Ranks
    draft_tp: Annotated[int, Field(ge=0, le=MOST_RANKS)]
    verify_batch: Count
    draft_leaves: Count
    draft_steps: Count


class Proposed(Part):
    tokens: list[Count]
    parents: list[Whole]


class Round(Part):
    """A round of a trace; docs/reference/trace.md says what the parts mean."""

    request: Count
    round: Count
    tokens: list[Count]
    target: TargetLane
    draft: DraftLane = LEFT_OUT
    wait: Span = LEFT_OUT
    population: Span = LEFT_OUT
    proposal: Proposed = LEFT_OUT
    path: Annotated[list[Count], Field(min_length=1)] = LEFT_OUT

    @model_validator(mode="after")
    def _is_whole(self) -> Round:
        verified = (self.target.verify, self.target.forward, self.proposal, self.path)
        if self.target.verify is not None and None in verified:
            raise ValueError("a verified round has forward, proposal and path")
        return self


def check(kind: type[M], data: Mapping[str, Any], name: str) -> None:
    """Raises UserError unless `data` is such an object; `name` stands at the front."""
    try:
        kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(
            f"{name} is damaged ({shown(place, 120)[1:-1]}: {' '.join(first['msg'].split())[:200]})"
        ) from None
