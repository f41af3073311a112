"""Engine configuration: the mode, the split of the ranks, the shape of the tree or of the population.

Each setting is declared once, at its dataclass field, with its limits and help text (see settings_schema.py). The
methods here check only rules that involve several fields.
"""

from dataclasses import dataclass, replace

from swiftspec.capabilities import Features, check_features, features_in
from swiftspec.drafter_kinds import DRAFTER_KINDS, DRAFTER_OF_FEATURE, GRAFTED, MODEL_FREE
from swiftspec.params import SamplingParams
from swiftspec.settings_schema import check_fields, require, setting

MODES = ("ar", "serial", "async", "smc")
DEFAULT_DRAFT_STEPS = 3  # default d: the fastest for the demo models in mode serial (docs/decisions/tree-and-cache.md)
# default w; more leaves slow a draft forward down on a CPU (docs/decisions/tree-and-cache.md); the paper uses 8
DEFAULT_DRAFT_LEAVES, GPU_DRAFT_LEAVES = 4, 8
MAX_MEASURED_DRAFT_STEPS = 16  # limit of a measured d: deeper nodes are hardly ever accepted
MAX_CONCURRENT_REQUESTS = 256
MAX_THREADS = 8  # threads of one operator by default: more take longer to synchronise than short rounds compute
MAX_TREE_NODES = 64  # limit of bs, w and d: a larger round costs more than it can save
MAX_ADAPTED_NODES = 32  # largest bs that adaptation chooses where it exceeds `verify_batch`
VERIFY_METHODS = ("match", "reject")
PROPOSAL_METHODS = ("top", "coupled", "sample")
# by proposal method; greedy: any method at temperature 0
DEFAULT_CALIBRATION = {"greedy": 0.6, "top": 1.0, "coupled": 0.7, "sample": 0.2}

# first line: headings of --help; second line: values of `applies_to`
SPECULATION, PARTICLES = "speculation", "mode smc: a population of particles, approximate"
SPECULATIVE_CONFIG = "speculative_config"  # the JSON flag for what only experiments set
DRAFT, TREE, LOOKAHEAD, POPULATION = "draft", "draft tree", "tree that grows during a verification", "population"


@dataclass(frozen=True, slots=True)
class PopulationConfig:
    """Configuration of a population: the particles of mode smc. Raises UserError on invalid values."""

    particles: int = setting(4, "Particles per request.", PARTICLES, "N", ge=1, le=1024, applies_to=POPULATION)
    smc_draft_tokens: int = setting(
        4,
        "Draft tokens per particle and round; the target adds one.",
        PARTICLES,
        "K",
        ge=1,
        le=MAX_TREE_NODES,
        applies_to=POPULATION,
    )
    ess_threshold: float = setting(  # 0: never resample
        0.5,
        "Resample when the effective sample size falls below this share of N.",
        PARTICLES,
        "X",
        ge=0,
        le=1,
        applies_to=POPULATION,
        json_flag=SPECULATIVE_CONFIG,
    )
    power: float = setting(  # alpha in smc/weights.py
        1.0,
        "Power A of the target distribution: texts are sampled from p(text)^A.",
        PARTICLES,
        "A",
        gt=0,
        le=100,
        applies_to=POPULATION,
        json_flag=SPECULATIVE_CONFIG,
    )
    smc_exact: int = setting(  # the first tokens of a round; all K of them, with power 1: exact output
        0,
        "Draft tokens per round that are verified exactly, by rejection sampling; the rest are weighted.",
        PARTICLES,
        "K",
        wording="lie in 0..smc_draft_tokens",
        depends_on="smc_draft_tokens",
        applies_to=POPULATION,
        json_flag=SPECULATIVE_CONFIG,
    )
    smc_groups: int = setting(
        1,
        "Requests decoded concurrently, each with its own particles.",
        PARTICLES,
        "G",
        ge=1,
        le=MAX_CONCURRENT_REQUESTS,
        applies_to=POPULATION,
    )
    deferred_bonus: bool = True  # False, for benchmarks: an additional forward computes the last draft token's KV

    def __post_init__(self) -> None:
        check_fields(self)
        most = self.smc_draft_tokens
        require(
            0 <= self.smc_exact <= most,
            f"smc_exact must lie in 0..{most} (smc_draft_tokens), not {self.smc_exact}",
        )

    @property
    def slots_per_round(self) -> int:
        """Tree slots that a round allocates for each request: one per particle for each draft token and the bonus
        token."""
        return self.particles * (self.smc_draft_tokens + 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of the engine: mode, split of the ranks, tree shape and population. Raises UserError on an
    invalid combination.

    In mode async the first `target_tp` ranks run the target and the next `draft_tp` ranks run the draft. With
    `target_tp` 1 and `draft_tp` 0, a single rank runs both models concurrently on its GPU, unless a worker runs one of
    them. In modes serial and smc the same ranks run both models alternately, so `target_tp` and `draft_tp` are equal.
    Mode ar has no draft. The rules of builder/rules.py resolve what is left open (None, "auto"): mode auto becomes
    serial with a draft and ar without one.

    The class is flat, because rules, flags, profiles and the labels of metrics address an option by its name alone.
    """

    mode: str = setting("auto", choices=("auto", *MODES))
    verify_batch: int = setting(
        8,
        "Tree nodes verified per round, including the root.",
        SPECULATION,
        "BS",
        ge=1,
        le=MAX_TREE_NODES,
        applies_to=TREE,
    )
    draft_leaves: int | None = setting(  # None: by the device of the draft
        None,
        "Leaves expanded per draft forward.",
        SPECULATION,
        "W",
        f"{DEFAULT_DRAFT_LEAVES}; {GPU_DRAFT_LEAVES} on a GPU",
        ge=1,
        le=MAX_TREE_NODES,
        applies_to=TREE,
    )
    draft_steps: int | None = setting(  # None: 3; in mode async as many as fit into a target forward
        None,
        "Draft forwards per round.",
        SPECULATION,
        "D",
        "async: as many as fit into a target forward; serial: 3",
        ge=1,
        le=MAX_TREE_NODES,
        applies_to=TREE,
    )
    verify: str = setting(
        "match",
        "match: accept nodes that equal the token that the target samples; the output is the same as without a"
        " draft. reject: rejection sampling of sampled children; the output has the same distribution.",
        SPECULATION,
        choices=VERIFY_METHODS,
        applies_to=TREE,
    )
    proposal: str | None = setting(  # None: coupled, or sample if `verify` is reject
        None,
        "How the children of a leaf are selected. top: the most likely. coupled: the most likely under"
        " the target's noise. sample: sampled without replacement.",
        SPECULATION,
        default_text="coupled; sample with --verify reject",
        choices=PROPOSAL_METHODS,
        applies_to=TREE,
        json_flag=SPECULATIVE_CONFIG,
    )
    calibration: float | None = setting(  # None: DEFAULT_CALIBRATION; see `calibration_for`
        None,
        "Temperature of the draft's confidence when nodes are ranked; below 1 favours its first choices.",
        SPECULATION,
        "C",
        "fitted to the demo models",
        ge=0.05,
        le=20,
        applies_to=TREE,
        json_flag=SPECULATIVE_CONFIG,
    )
    catch_up: bool = setting(
        True,
        "Mode async: after a result, expand while that is worthwhile; off: only below bs nodes, as in the paper.",
        SPECULATION,
        applies_to=LOOKAHEAD,
        json_flag=SPECULATIVE_CONFIG,
    )
    synthetic_acceptance_length: float | None = setting(  # tree/synthetic_acceptance.py
        None,
        "Accept draft tokens so that a round has this mean number of output tokens, whatever the target samples:"
        " for comparisons of speed. The text is not the target's.",
        SPECULATION,
        "A",
        "off",
        finite=True,
        wording="lie in 1..verify_batch",
        depends_on="verify_batch",
        json_flag=SPECULATIVE_CONFIG,
    )
    max_num_seqs: int = setting(
        1,
        "Requests decoded concurrently (not in mode smc), each with its own tree, guided ones counted twice.",
        SPECULATION,
        "G",
        "1; a server on a CPU: up to 4, whose contexts fit half of the memory",
        ge=1,
        le=MAX_CONCURRENT_REQUESTS,
    )
    self_switch: bool = False  # decode without the draft while that is faster; rounds then depend on the clock
    adapt_steps: bool = False  # d follows measurements of running requests; rounds then depend on the clock
    adapt_batch: bool = False  # bs follows measurements, up to `max_nodes`; rounds then depend on the clock
    time_rows: bool = False  # the models' forwards are timed at start by their number of rows
    target_tp: int = setting(1, ge=1)
    draft_tp: int = -1  # -1: default of the mode (async 1, or 0 with a worker; ar 0; others target_tp)
    target_remote: bool = False  # a worker runs the target instead of the ranks of this job
    draft_remote: bool = False  # the same for the draft
    population: PopulationConfig = PopulationConfig()  # mode smc
    # what proposes; auto: the draft model, or the rules of builder/rules.py add suffix lookup
    drafter: str = setting("auto", choices=("auto", *DRAFTER_KINDS))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.proposal is None:
            object.__setattr__(self, "proposal", "sample" if self.verify == "reject" else "coupled")
        remote = self.target_remote or self.draft_remote
        usual = {"ar": 0, "async": 0 if remote else 1}.get(self.mode, self.target_tp)
        if self.draft_tp == -1:
            object.__setattr__(self, "draft_tp", usual)
        check_features(self.features)
        length, most = self.synthetic_acceptance_length, self.verify_batch
        fits = length is None or 1 <= length <= most
        require(fits, f"synthetic_acceptance_length must lie in 1..{most} (verify_batch), not {length or 0:g}")
        if self.mode == "async":
            alone = self.draft_tp == 0 and self.target_tp == 1
            require(self.draft_tp >= 1 or alone, f"draft_tp must be at least 1 in mode async, not {self.draft_tp}")
        else:
            require(self.draft_tp == usual, f"draft_tp must be {usual} in mode {self.mode}, not {self.draft_tp}")

    @property
    def features(self) -> Features:
        """The columns of the capability table (capabilities.py) that the engine uses."""
        drafts_tree = self.mode not in ("ar", "smc")
        found = {
            f"mode {self.mode}": self.mode != "auto",
            "overlap": self.overlap_on_one_gpu,
            "several ranks": self.num_ranks > 1,
            "several requests": self.max_num_seqs > 1,
            "verify reject": self.verify == "reject",
            f"proposal {self.proposal}": drafts_tree or self.verify == "reject",
            "self-switch": self.self_switch,
            "adapted shape": self.adapts_shape,
            "synthetic acceptance": self.synthetic_acceptance_length is not None,
            **{feature: self.drafter == name for feature, name in DRAFTER_OF_FEATURE.items()},
            "target worker": self.target_remote,
            "draft worker": self.draft_remote,
        }
        return features_in(found)

    def check_request(self, sampling: SamplingParams) -> None:
        """Raises UserError if `sampling` does not fit this configuration: its mode, its proposal method, or the largest
        bs and d that its caches are allocated for."""
        found = self.features | sampling.features
        if sampling.verify_batch == 1:  # decoded without the draft
            found -= {"synthetic acceptance"}
        check_features(found)
        room = {"verify_batch": self.verify_batch, "draft_steps": self.max_draft_steps}
        for name, most in room.items():
            asked = getattr(sampling, name)
            fits = asked is None or asked <= most
            require(fits, f"{name} of a request must lie in 1..{most}, the limit of this engine, not {asked}")
        length, bs = self.synthetic_acceptance_length, sampling.verify_batch
        fits = length is None or bs in (None, 1) or bs >= length
        require(
            fits,
            f"verify_batch of a request must be 1 or at least the synthetic_acceptance_length {length or 0:g}, not"
            f" {bs}",
        )

    def for_request(self, sampling: SamplingParams) -> "EngineConfig":
        """Returns the configuration with the bs and d that a request sets. If it sets either of them, bs, d and the use
        of the draft do not adapt during the request, and nothing is grafted."""
        if not sampling.sets_shape:
            return self
        shape = {"verify_batch": sampling.verify_batch or self.verify_batch}
        shape["draft_steps"] = sampling.draft_steps or self.initial_draft_steps
        synthetic = None if shape["verify_batch"] == 1 else self.synthetic_acceptance_length
        return replace(
            self,
            **shape,
            self_switch=False,
            adapt_steps=False,
            adapt_batch=False,
            synthetic_acceptance_length=synthetic,
        )

    def calibration_for(self, greedy: bool) -> float:
        """Returns the calibration, which makes a child's weight approximate the probability that the target accepts the
        child.

        With proposal methods top and coupled it is a temperature, by which the draft's scores are divided; with method
        sample it is the exponent of q in `child_log_weights` (tree/sampled_children.py). `greedy`: whether the request
        has temperature 0. The defaults fit the demo models.
        """
        if self.calibration is not None:
            return self.calibration
        return DEFAULT_CALIBRATION["greedy" if greedy else str(self.proposal)]

    @property
    def drafts_without_model(self) -> bool:
        """Whether a drafter without a draft model proposes, such as suffix lookup."""
        return self.drafter in MODEL_FREE

    @property
    def grafts_suffix(self) -> bool:
        """Whether suffix lookup adds to the proposals of a draft model."""
        return self.drafter == GRAFTED

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model proposes, in this job or on a worker."""
        return self.mode != "ar" and not self.drafts_without_model

    @property
    def adapts_shape(self) -> bool:
        """Whether d or bs is adapted to measurements."""
        return self.adapt_steps or self.adapt_batch

    @property
    def children_per_leaf(self) -> int:
        """k, the number of children of an expanded leaf: a round of the configured size cannot verify or expand more of
        them."""
        return max(self.verify_batch, self.leaves_per_expansion)

    @property
    def max_nodes(self) -> int:
        """Largest bs of any round; caches are allocated for it. It exceeds `verify_batch` where adaptation knows the
        times of larger verifications."""
        return max(self.verify_batch, MAX_ADAPTED_NODES if self.time_rows and self.adapt_batch else 0)

    @property
    def leaves_per_expansion(self) -> int:
        """w, or its default on a CPU if it is not resolved."""
        return self.draft_leaves if self.draft_leaves is not None else DEFAULT_DRAFT_LEAVES

    @property
    def initial_draft_steps(self) -> int:
        """d, or its initial value if d is measured."""
        return self.draft_steps if self.draft_steps is not None else DEFAULT_DRAFT_STEPS

    @property
    def draft_steps_adaptive(self) -> bool:
        """Whether d is not fixed: in mode async a draft worker then expands as often as time allows, so that rounds
        depend on the clock."""
        return self.draft_steps is None or self.adapt_steps

    @property
    def max_draft_steps(self) -> int:
        """Largest d of any round; draft trees are allocated for it."""
        measured = self.adapt_steps or (self.mode == "async" and self.draft_steps is None)
        return max(MAX_MEASURED_DRAFT_STEPS, self.initial_draft_steps) if measured else self.initial_draft_steps

    @property
    def is_adaptive(self) -> bool:
        """Whether d, bs or the use of the draft is adapted to measurements."""
        return self.self_switch or self.adapts_shape

    @property
    def num_ranks(self) -> int:
        """G, the number of ranks of the job."""
        return self.target_tp + (self.draft_tp if self.mode == "async" else 0)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the KV cache of a model: one for each concurrent request. A guided request takes two
        of several; a single one allocates a second one."""
        return self.population.smc_groups if self.mode == "smc" else self.max_num_seqs

    @property
    def overlap_on_one_gpu(self) -> bool:
        """Whether both models run concurrently on one GPU (overlapped mode)."""
        return self.mode == "async" and self.num_ranks == 1 and not (self.target_remote or self.draft_remote)
