"""The rules by which options become the configuration of an engine: one table, evaluated in one pass.

Each option has a list of rules, and the first that applies sets it; without one it has its default. CHOSEN sets what
the user or a profile has chosen: rules before it restrict a choice, rules after it replace a missing one. Imports must
stay cheap (no torch), because settings are checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swiftspec.capabilities import check_features, features_in
from swiftspec.config import (
    DEFAULT_DRAFT_LEAVES,
    DEFAULT_DRAFT_STEPS,
    GPU_DRAFT_LEAVES,
    MAX_TREE_NODES,
    EngineConfig,
    PopulationConfig,
)
from swiftspec.drafter_kinds import DRAFT_WORDS, GRAFTED, MODEL_FREE
from swiftspec.settings_schema import require

ENGINE_FIELDS = {item.name: item.default for item in fields(EngineConfig)}
POPULATION_FIELDS = {item.name: item.default for item in fields(PopulationConfig)}
BlockSize = Callable[[], int | None]
AUTO = "auto"
GIVEN = "given"  # name of the rule that sets what the user has chosen
SERVER = "server"  # name of the rule for the concurrent requests of a server
# Of a server on a CPU. One client alone is at most 1.3 % slower than with 1; four of them are 1.5 to 2.2 times as fast
# on texts that nothing predicts, 1.2 times on texts that suffix lookup predicts (docs/benchmarks/serving.md).
SERVER_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen for an engine; the rules decide the rest.

    `given`: what the user has set, by name: fields of EngineConfig and of PopulationConfig, and `adapt`.
    `profile`: values of a profile, for options that are not given. Unlike given ones they are adapted to measurements.
    `profile_file`: file of the profile.
    `draft`: the local draft model, "suffix" or "mtp"; None: there is none.
    `ranks`: number of ranks that the rules split between the models; None: `given` has the split.
    `overlaps`: returns whether one rank can run both models at the same time.
    `features`: returns for a mode the features of the capability table that the choices have.
    `serves`: whether several clients may send requests.
    """

    given: Mapping[str, Any]
    draft: object = None
    ranks: int | None = None
    profile: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profile_file: str = ""
    overlaps: Callable[[], bool] = lambda: False
    features: Callable[[str], Collection[str]] = lambda mode: ()
    serves: bool = False

    @staticmethod
    def of(config: EngineConfig | Choices | None, draft: object) -> Choices:
        """Returns the choices of a configuration: all of its fields except those that it leaves to the rules. None:
        the default configuration."""
        if isinstance(config, Choices):
            return config
        config = config or EngineConfig()
        left = {"time_rows"} | ({"mode", "draft_tp"} if config.mode == AUTO else set())
        left |= {name for name in ENGINE_FIELDS if getattr(config, name) in (None, AUTO)}
        given = {name: getattr(config, name) for name in ENGINE_FIELDS if name not in left}
        needed = config.mode == AUTO or config.has_draft_model
        choices = Choices(given, draft)
        features = config.features | ({"no draft"} if needed and not choices.has_draft else set())
        return Choices(given, draft, features=lambda mode: features)

    @property
    def has_draft(self) -> bool:
        """Whether something proposes: a draft model, here or on a worker, or suffix lookup."""
        lookup = self.given.get("drafter") in MODEL_FREE
        return self.draft is not None or lookup or bool(self.given.get("draft_remote"))


@dataclass(frozen=True, slots=True)
class Reason:
    """The value of an option, and why it has that value. `rule`: name of the rule that has set it."""

    value: Any
    rule: str
    why: str = ""


class Resolution:
    """One pass over the rules: what is known, and the options that are resolved so far.

    `device`: type of the device of this process's models; None: not known yet.
    `block_size`: returns the positions that one forward of the draft drafts if that is a block head, else None.
    """

    def __init__(self, choices: Choices, device: str | None = None, block_size: BlockSize = lambda: None) -> None:
        """Resolves all options. Raises UserError if the choices are not supported together, or do not split the
        ranks."""
        self.choices, self.device, self.block_size = choices, device, block_size
        self.reasons: dict[str, Reason] = {}
        for option, rules in RULES.items():
            reasons = (rule.reason(self, option) for rule in rules)
            reason = next((each for each in reasons if each is not None), None)
            if reason is not None:
                self.reasons[option] = reason
            if option == "mode":
                check_choices(self)
        for option in {**choices.profile, **choices.given}.keys() & ENGINE_FIELDS.keys() - RULES.keys():
            if (chosen := CHOSEN.reason(self, option)) is not None and chosen.value != ENGINE_FIELDS[option]:
                self.reasons[option] = chosen

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an option."""
        if name in self.reasons:
            return self.reasons[name].value
        return self.chosen(name, ENGINE_FIELDS[name])

    def chosen(self, name: str, default: Any = None) -> Any:
        """Returns what the user or the profile has chosen."""
        return self.choices.given.get(name, self.choices.profile.get(name, default))

    def is_given(self, name: str) -> bool:
        """Returns whether the user has set an option."""
        return name in self.choices.given

    @property
    def splits(self) -> bool:
        """Whether the rules split the ranks."""
        return self.choices.ranks is not None

    @property
    def ranks(self) -> int:
        """Number of ranks to split."""
        return self.choices.ranks or 1

    @property
    def remote(self) -> bool:
        """Whether a worker runs one of the models."""
        return self["target_remote"] or self["draft_remote"]

    @property
    def apart(self) -> bool:
        """Whether the draft model can have ranks or a machine of its own."""
        return (self.ranks > 1 or self.remote) and self.choices.draft not in DRAFT_WORDS

    @property
    def on_one_rank(self) -> bool:
        """Whether mode async has one rank, since that runs both models at the same time or a worker runs one."""
        fits = self.ranks == 1 and self.chosen("target_tp", 1) == 1 and self.chosen("draft_tp", 0) == 0
        return self["mode"] == "async" and fits and (self.remote or self.choices.overlaps())

    @property
    def serves_together(self) -> bool:
        """Whether a server decodes several requests at a time unless another number is chosen."""
        one_process = self.ranks == 1 and self.device == "cpu" and not self.remote
        return self.choices.serves and one_process and self["mode"] in ("ar", "serial") and not self.choices.profile

    @property
    def speculates(self) -> bool:
        """Whether the target verifies proposals."""
        return self["mode"] in ("serial", "async")

    @property
    def fixed_rounds(self) -> bool:
        """Whether rounds depend on measured times only if that is requested."""
        synthetic = self["synthetic_acceptance_length"] is not None
        return self["verify"] == "reject" or synthetic

    @property
    def alternates(self) -> bool:
        """Whether this job runs draft and target alternately on trees, with match verification, and adapts to measured
        times."""
        adaptive = self["self_switch"] or self["adapt_steps"] or self["adapt_batch"]
        serial = self["mode"] == "serial" and not self.remote
        return serial and adaptive and self["verify"] == "match"

    @property
    def narrow(self) -> bool:
        """Whether trees have few rows unless others are chosen."""
        serial = self["mode"] == "serial" and not self.remote
        return self["verify"] == "reject" and serial and self.device == "cpu"

    @property
    def block(self) -> int | None:
        """Positions that a forward of the drafter drafts, if that is a block head."""
        return self.block_size() if self["mode"] == "serial" else None

    @property
    def steps(self) -> int:
        """d, or its initial value."""
        return self["draft_steps"] or DEFAULT_DRAFT_STEPS

    def config(self) -> EngineConfig:
        """Returns the configuration. Raises UserError if options are not supported together."""
        ruled = {name: each.value for name, each in self.reasons.items()}
        values = {**self.choices.profile, **self.choices.given, **ruled}
        engine = {name: value for name, value in values.items() if name in ENGINE_FIELDS}
        particles = {name: value for name, value in values.items() if name in POPULATION_FIELDS}
        if particles:
            engine["population"] = PopulationConfig(**particles)
        return EngineConfig(**engine)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that sets an option.

    `name`: for `swiftspec doctor --plan`. `why`: the reason, a clause.
    `value`: what it sets, or a function that returns that.
    `when`: returns whether it applies.
    """

    name: str
    why: str
    value: Any
    when: Callable[[Resolution], Any] = lambda at: True

    def reason(self, at: Resolution, option: str) -> Reason | None:
        """Returns what the rule sets, or None if it does not apply."""
        if not self.when(at):
            return None
        return Reason(self.value(at) if callable(self.value) else self.value, self.name, self.why)


class Chosen:
    """The rule that sets what the user or a profile has chosen."""

    def reason(self, at: Resolution, option: str) -> Reason | None:
        """Returns the choice, or None if there is none."""
        if at.is_given(option):
            return Reason(at.choices.given[option], GIVEN)
        if option in at.choices.profile:
            return Reason(at.choices.profile[option], "profile", at.choices.profile_file)
        return None


CHOSEN = Chosen()
ONE_FORWARD = "one forward drafts a whole block"
NARROW = "more rows prolong forwards on a CPU, and rounds do not adapt"
FIXED_ROUNDS = "with verify reject or synthetic acceptance, rounds do not depend on the clock"
MEASURED = "measured times decide"
NO_ADAPTATION = Rule("no adaptation", "adapt is off", False, lambda at: at.chosen("adapt") is False)
ADAPTATION = (
    NO_ADAPTATION,
    Rule("fixed rounds", FIXED_ROUNDS, False, lambda at: at.fixed_rounds and not at.is_given("adapt")),
    Rule("adaptation", MEASURED, True, lambda at: at.speculates),
)
# option -> its rules, which read only options above it
RULES: Mapping[str, tuple[Rule | Chosen, ...]] = {
    "mode": (
        CHOSEN,
        Rule("no draft", "nothing proposes tokens", "ar", lambda at: not at.choices.has_draft),
        Rule("separate ranks", "draft and target run at the same time", "async", lambda at: at.splits and at.apart),
        Rule("shared ranks", "draft and target run alternately", "serial"),
    ),
    "draft_tp": (
        Rule("no draft", "mode ar has no draft", 0, lambda at: at.splits and at["mode"] == "ar"),
        Rule(
            "shared ranks", "all run both models", lambda at: at.ranks, lambda at: at.splits and at["mode"] != "async"
        ),
        Rule("one rank", "it overlaps both models, or a worker runs one", 0, lambda at: at.splits and at.on_one_rank),
        CHOSEN,
        Rule(
            "rest of the ranks",
            "the target leaves these",
            lambda at: at.ranks - at.chosen("target_tp"),
            lambda at: at.splits and at.chosen("target_tp") is not None,
        ),
        Rule(
            "quarter of the ranks",
            "a small model gains little from more",
            lambda at: max(1, at.ranks // 4),
            lambda at: at.splits,
        ),
    ),
    "target_tp": (
        Rule(
            "all ranks",
            "the draft has no ranks of its own",
            lambda at: at.ranks,
            lambda at: at.splits and (at["mode"] != "async" or at["draft_tp"] == 0),
        ),
        CHOSEN,
        Rule("rest of the ranks", "the draft leaves these", lambda at: at.ranks - at["draft_tp"], lambda at: at.splits),
    ),
    "self_switch": (
        CHOSEN,
        NO_ADAPTATION,
        Rule("fixed rounds", FIXED_ROUNDS, False, lambda at: at.fixed_rounds),
        Rule("adaptation", MEASURED, True, lambda at: at.speculates),
    ),
    "adapt_steps": (
        Rule("block head", ONE_FORWARD, False, lambda at: at.block),
        CHOSEN,
        Rule("given value", "draft_steps is given", False, lambda at: at.is_given("draft_steps")),
        *ADAPTATION,
    ),
    "adapt_batch": (
        CHOSEN,
        Rule("given value", "verify_batch is given", False, lambda at: at.is_given("verify_batch")),
        *ADAPTATION,
    ),
    "drafter": (
        Rule("no draft", "mode ar has no draft", "model", lambda at: at["mode"] == "ar"),
        Rule(
            "drafter without a model",
            "it stands for the draft model",
            lambda at: at.choices.draft,
            lambda at: at.choices.draft in MODEL_FREE,
        ),
        CHOSEN,
        Rule(
            "grafting",
            "rounds depend on the clock anyway, and those without the draft model are shorter",
            GRAFTED,
            lambda at: at.alternates,
        ),
        Rule("draft model", "it proposes alone", "model"),
    ),
    "draft_steps": (
        Rule(
            "block head",
            ONE_FORWARD,
            lambda at: min(at.chosen("draft_steps") or at.block, at.block),
            lambda at: at.block,
        ),
        CHOSEN,
    ),
    "verify_batch": (
        CHOSEN,
        Rule("rejection sampling", NARROW, lambda at: min(at.steps + 1, MAX_TREE_NODES), lambda at: at.narrow),
    ),
    "draft_leaves": (
        CHOSEN,
        Rule("rejection sampling", NARROW, 1, lambda at: at.narrow),
        Rule(
            "GPU",
            "more rows hardly prolong its forwards",
            GPU_DRAFT_LEAVES,
            lambda at: at.device == "cuda" and not at["draft_remote"],
        ),
        Rule(
            "CPU",
            "more rows prolong its forwards, and every worker accepts these",
            DEFAULT_DRAFT_LEAVES,
            lambda at: at.device is not None,
        ),
    ),
    "max_num_seqs": (
        CHOSEN,
        Rule(SERVER, "requests of several clients share forwards", SERVER_REQUESTS, lambda at: at.serves_together),
    ),
    "time_rows": (
        Rule("block head", ONE_FORWARD, False, lambda at: at.block),
        Rule(
            "one process",
            "adaptation uses the times of the forwards of both models",
            True,
            lambda at: at.device is not None and at.alternates and at["target_tp"] == 1,
        ),
    ),
}


def check_choices(at: Resolution) -> None:
    """Raises UserError if the choices are not supported together in the resolved mode, or do not split the ranks."""
    mode, ranks = at["mode"], at.ranks
    check_features(at.choices.features(mode))
    if not at.splits:
        return
    target, draft = at.chosen("target_tp"), at.chosen("draft_tp")
    if mode != "async":
        groups = {"target group": target not in (None, ranks)}
        groups["draft group"] = draft not in (None, 0 if mode == "ar" else ranks)
        check_features(features_in(groups) | {f"mode {mode}"})
        return
    if at.on_one_rank:
        return
    if ranks < 2:
        check_features({"one rank", "mode async"})
    if target is not None and draft is not None:
        require(
            target >= 1 and draft >= 1 and target + draft == ranks,
            f"--target-tp {target} and --draft-tp {draft} must be at least 1 and add up to {ranks} ranks",
        )
        return
    for name, given in (("target", target), ("draft", draft)):
        fits = given is None or 1 <= given < ranks
        require(fits, f"--{name}-tp {given} leaves none of the {ranks} ranks for the other model: use 1..{ranks - 1}")


def default_reason(name: str) -> Reason:
    """Returns the default of a field of EngineConfig."""
    item = next(each for each in fields(EngineConfig) if each.name == name)
    declared = item.metadata.get("setting")
    return Reason(item.default, "default", "" if declared is None else declared.default_text or "")


def resolve_config(config: EngineConfig | Choices | None, draft: object, device: str | None = None) -> EngineConfig:
    """Returns a configuration in which the rules have set what is open. See `Choices.of` and `Resolution`."""
    return Resolution(Choices.of(config, draft), device).config()
