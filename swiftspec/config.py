"""Engine configuration: the mode, the split of the ranks, the shape of the tree or of the population.

Each setting is declared once, at its field (see settings_schema.py). The code below checks only rules that involve
several fields.
"""

from dataclasses import dataclass, replace

from swiftspec.params import SamplingParams
from swiftspec.settings_schema import check_fields, require, setting

MODES = ("ar", "serial", "async", "smc")
DEFAULT_DRAFT_STEPS = 3  # default d: the fastest for the demo models in mode serial (docs/decisions/tree-and-cache.md)
MAX_MEASURED_DRAFT_STEPS = 16  # a larger measured d adds nodes that are hardly ever accepted
MAX_CONCURRENT_REQUESTS = 256
MAX_TREE_NODES = 64  # bound of bs, w and d: a larger round costs more than it can save
VERIFY_METHODS = ("match", "reject")
PROPOSAL_METHODS = ("top", "coupled", "sample")
DEFAULT_CALIBRATION = {"greedy": 0.6, "top": 1.0, "coupled": 0.7, "sample": 0.2}

# headings of --help, and the values of `applies_to`
SPECULATION, PARTICLES = "speculation", "mode smc: a population of particles, approximate"
DRAFT, TREE, LOOKAHEAD, POPULATION = "draft", "draft tree", "tree that grows during a verification", "population"


@dataclass(frozen=True, slots=True)
class PopulationConfig:
    """Shape of a population of particles (mode smc). Raises UserError on invalid values."""

    particles: int = setting(4, "Particles per request.", PARTICLES, "N", ge=1, le=1024, applies_to=POPULATION)
    smc_draft_tokens: int = setting(
        4, "Draft tokens per particle and round; the target adds one.", PARTICLES, "K", ge=1, le=MAX_TREE_NODES,
        applies_to=POPULATION,
    )  # fmt: skip
    ess_threshold: float = setting(  # 0: never
        0.5, "Resample when the effective sample size falls below this share of N.", PARTICLES, "X", ge=0, le=1,
        applies_to=POPULATION,
    )  # fmt: skip
    power: float = setting(  # alpha
        1.0, "Power A of the target distribution: texts are sampled from p(text)^A.", PARTICLES, "A", gt=0,
        le=100, applies_to=POPULATION,
    )  # fmt: skip
    smc_exact: int = setting(  # leading draft tokens; with K of them the output is exact
        0, "Draft tokens of a round that are verified exactly, by rejection; the rest is weighted.", PARTICLES, "K",
        rule="lie in 0..smc_draft_tokens", depends_on="smc_draft_tokens", applies_to=POPULATION,
    )  # fmt: skip
    smc_groups: int = setting(
        1, "Requests decoded concurrently, each with its own particles.", PARTICLES, "G", ge=1,
        le=MAX_CONCURRENT_REQUESTS, applies_to=POPULATION,
    )  # fmt: skip
    chains: str | None = None  # verification of chains of one particle, match or reject; None: weights
    deferred_bonus: bool = True  # False, for benchmarks: a separate forward reads the last draft token of a round

    def __post_init__(self) -> None:
        check_fields(self)
        most = self.smc_draft_tokens
        require(
            0 <= self.smc_exact <= most,
            f"smc_exact must lie in 0..{most}, the draft tokens of a round, not {self.smc_exact}",
        )

    @property
    def num_rejection_tokens(self) -> int:
        """Number of leading draft tokens per round that are verified by rejection sampling."""
        return self.smc_draft_tokens if self.chains == "reject" else self.smc_exact

    @property
    def slots_per_round(self) -> int:
        """Cache slots that a round allocates: one for each new token of each particle."""
        return self.particles * (self.smc_draft_tokens + 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The mode, the split of the ranks and the shape of the tree. Raises UserError on an invalid combination.

    In mode async the first `target_tp` ranks run the target and the next `draft_tp` ranks run the draft; 1 and 0 mean
    one rank whose GPU runs both at the same time. In modes serial and smc one group runs both models alternately, so
    the two sizes are equal. Mode ar has no draft.
    """

    mode: str = setting("serial", choices=MODES)
    verify_batch: int = setting(
        8,
        "Tree nodes verified per round, the root counted.",
        SPECULATION,
        "BS",
        ge=1,
        le=MAX_TREE_NODES,
        applies_to=TREE,
    )
    draft_leaves: int = setting(
        4, "Leaves expanded per draft forward.", SPECULATION, "W", ge=1, le=MAX_TREE_NODES, applies_to=TREE
    )
    draft_steps: int | None = setting(  # None: 3; in mode async measured at start
        None, "Draft forwards per round.", SPECULATION, "D", "async: as many as fit into a target forward; serial: 3",
        ge=1, le=MAX_TREE_NODES, applies_to=TREE,
    )  # fmt: skip
    verify: str = setting(
        "match", "match: nodes that equal the token that the target samples are accepted; the same text as without a"
        " draft. reject: rejection sampling of sampled children; a text of the same distribution.", SPECULATION,
        choices=VERIFY_METHODS, applies_to=TREE,
    )  # fmt: skip
    proposal: str | None = setting(  # None: follows from verify
        None, "How the children of a leaf are selected. top: the most likely. coupled: the most likely under"
        " the target's noise. sample: sampled without replacement.", SPECULATION,
        default_text="coupled; sample with --verify reject",
        choices=PROPOSAL_METHODS,
        applies_to=TREE,
    )  # fmt: skip
    calibration: float | None = setting(  # of the children's weights; None: see `calibration_for`
        None, "Temperature of the draft's confidence when nodes are ranked; below 1 favours its first"
        " choices.", SPECULATION,
        "C", "fitted to the demo models", ge=0.05, le=20, applies_to=TREE,
    )  # fmt: skip
    catch_up: bool = setting(
        True, "Mode async: after a result, expand as long as that pays (off: only below bs nodes, the paper's"
        " rule).", SPECULATION,
        applies_to=LOOKAHEAD,
    )  # fmt: skip
    max_num_seqs: int = setting(
        1, "Requests decoded concurrently in mode serial; above 1 each has a chain of D draft tokens instead of a"
        " tree.", SPECULATION, "G", ge=1, le=MAX_CONCURRENT_REQUESTS,
    )  # fmt: skip
    self_switch: bool = False  # decode without the draft while that is faster; rounds then depend on the clock
    adapt_steps: bool = False  # d follows measurements of running requests; rounds then depend on the clock
    adapt_batch: bool = False  # the same for bs, which never exceeds verify_batch
    target_tp: int = setting(1, ge=1)
    draft_tp: int = -1  # -1: default of the mode (async 1, serial and smc target_tp, ar 0)
    target_remote: bool = False  # a worker runs the target, and no rank of this job
    draft_remote: bool = False
    population: PopulationConfig = PopulationConfig()  # mode smc

    def __post_init__(self) -> None:
        check_fields(self)
        if self.proposal is None:
            object.__setattr__(self, "proposal", "sample" if self.verify == "reject" else "coupled")
        remote = self.target_remote or self.draft_remote
        require(self.mode != "smc" or not remote, "mode smc runs both models in one place: take a mode with a tree")
        usual = {"ar": 0, "async": 0 if remote else 1}.get(self.mode, self.target_tp)
        if self.draft_tp == -1:
            object.__setattr__(self, "draft_tp", usual)
        self._check_rejection()
        if self.max_num_seqs > 1:
            self._make_chains()
        if self.mode == "async":
            alone = self.draft_tp == 0 and self.target_tp == 1
            require(self.draft_tp >= 1 or alone, f"draft_tp must be at least 1 in mode async, not {self.draft_tp}")
        else:
            require(self.draft_tp == usual, f"draft_tp must be {usual} in mode {self.mode}, not {self.draft_tp}")

    def _check_rejection(self) -> None:
        """Checks the fields that rejection sampling depends on."""
        require(
            self.verify == "match" or self.proposal == "sample",
            f"verify reject needs the distribution that tokens were drawn from, and proposal {self.proposal} carries"
            " none: take proposal sample, or verify match",
        )
        require(
            self.verify == "match" or not self.adapts_shape,
            "with verify reject the text depends on the tree, which must not depend on time: leave adapt_* out",
        )

    def _make_chains(self) -> None:
        """Turns the tree into a chain: one leaf per expansion, all nodes verified, the same shape for every request."""
        here = self.mode == "serial" and not (self.target_remote or self.draft_remote)
        require(here, "max_num_seqs above 1 is for mode serial without workers; mode smc has smc_groups")
        require(not self.is_adaptive, "max_num_seqs above 1 has rounds of one shape: leave self_switch and adapt_* out")
        fits = self.proposal == ("sample" if self.verify == "reject" else "coupled")
        require(fits, f"with max_num_seqs above 1 verify {self.verify} says what is proposed: leave proposal out")
        require(
            self.initial_draft_steps < MAX_TREE_NODES,
            f"a chain has 1..{MAX_TREE_NODES - 1} draft_steps, not {self.initial_draft_steps}",
        )
        object.__setattr__(self, "draft_leaves", 1)
        object.__setattr__(self, "verify_batch", self.initial_draft_steps + 1)

    def check_request(self, sampling: SamplingParams) -> None:
        """Raises UserError on a request that the tree cannot serve."""
        instead = "verify match" if self.verify == "reject" else "proposal top"
        require(
            self.mode in ("ar", "smc") or self.proposal != "sample" or not sampling.greedy,
            f"proposal sample draws tokens, and temperature 0 leaves nothing to draw: raise it, or take {instead}",
        )
        drafts = (sampling.verify_batch or 1) > 1 or sampling.draft_steps is not None
        require(self.mode != "ar" or not drafts, "mode ar has no draft: leave verify_batch and draft_steps out")
        room = {"verify_batch": self.verify_batch, "draft_steps": self.max_draft_steps}
        for name, most in room.items():
            asked = getattr(sampling, name)
            fits = asked is None or asked <= most
            require(fits, f"{name} of a request must lie in 1..{most}, what this engine has room for, not {asked}")

    def for_request(self, sampling: SamplingParams) -> "EngineConfig":
        """The configuration for the rounds of one request. A request that sets any part of the shape disables
        adaptation of all parts."""
        if sampling.verify_batch is None and sampling.draft_steps is None:
            return self
        shape = {"verify_batch": sampling.verify_batch or self.verify_batch}
        shape["draft_steps"] = sampling.draft_steps or self.initial_draft_steps
        return replace(self, **shape, self_switch=False, adapt_steps=False, adapt_batch=False)

    def calibration_for(self, greedy: bool) -> float:
        """Calibration that turns a child's weight into the probability that the target agrees. For children ranked by
        likelihood it is a temperature on the draft's log-probabilities, for sampled children an exponent of its
        confidence. The defaults fit the demo models."""
        if self.calibration is not None:
            return self.calibration
        return DEFAULT_CALIBRATION["greedy" if greedy else str(self.proposal)]

    @property
    def adapts_shape(self) -> bool:
        """Whether the shape of a round follows measurements."""
        return self.adapt_steps or self.adapt_batch

    @property
    def children_per_leaf(self) -> int:
        """k, the children kept per expanded leaf: as many as could be verified or expanded next."""
        return max(self.verify_batch, self.draft_leaves)

    @property
    def initial_draft_steps(self) -> int:
        """d, or its initial value if d is measured."""
        return self.draft_steps if self.draft_steps is not None else DEFAULT_DRAFT_STEPS

    @property
    def draft_steps_adaptive(self) -> bool:
        """Whether d is not fixed but as large as the time allows; rounds then depend on the clock."""
        return self.draft_steps is None or self.adapt_steps

    @property
    def max_draft_steps(self) -> int:
        """The largest d that the trees are allocated for."""
        measured = self.adapt_steps or (self.mode == "async" and self.draft_steps is None)
        return max(MAX_MEASURED_DRAFT_STEPS, self.initial_draft_steps) if measured else self.initial_draft_steps

    @property
    def is_adaptive(self) -> bool:
        """Whether the kind or the shape of a round follows measurements."""
        return self.self_switch or self.adapts_shape

    @property
    def num_ranks(self) -> int:
        """G, the number of ranks of the plan."""
        return self.target_tp + (self.draft_tp if self.mode == "async" else 0)

    @property
    def effective_population(self) -> PopulationConfig | None:
        """Shape of the sequence groups that requests are decoded in: as configured in mode smc; one particle per group,
        whose draft tokens are verified, if `max_num_seqs` is above 1; None for a tree, which decodes one request at a
        time."""
        if self.mode == "smc":
            return self.population
        if self.max_num_seqs == 1:
            return None
        return PopulationConfig(1, self.initial_draft_steps, smc_groups=self.max_num_seqs, chains=self.verify)

    @property
    def num_sequences(self) -> int:
        """Sequences of a model's KV cache: one per concurrent request. A guided request takes a second one."""
        return 1 if self.effective_population is None else self.effective_population.smc_groups

    @property
    def overlap_on_one_gpu(self) -> bool:
        """Whether both models run on one GPU at the same time."""
        return self.mode == "async" and self.num_ranks == 1 and not (self.target_remote or self.draft_remote)
