"""How to decode: the sampling parameters of a request and the plan of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swiftspec.errors import UserError

MODES = ("ar", "serial", "async", "smc")
MIN_TEMPERATURE = 0.001  # float32 logits divided by less may overflow
MAX_GUIDANCE = 100.0
MAX_BIAS = 1e9  # as good as infinite, and safe in float32
DEFAULT_STEPS = 3  # d where nothing else is said: the best for the embedded pair in turns (docs/log.md)
MAX_TREE = 64  # bounds of bs, w and d: beyond them a round costs more than it can win back
MAX_PARTICLES = 1024
MAX_POWER = 100.0
VERIFY = ("match", "reject")
PROPOSALS = ("top", "coupled", "sample")
CALIBRATION = {"greedy": 0.6, "top": 1.0, "coupled": 0.7, "sample": 0.2}


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes the target's distribution, and what ends the text. Raises UserError on nonsense values.

    Order: guidance, logit_bias, penalties, temperature, min_p, top_k, top_p. Penalties count the tokens of the path up
    to the row: repetition the prompt's too, presence and frequency those of the output only. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int | None = None  # None: to the end of the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    guidance_scale: float = 1.0  # s of l_u + s (l_c - l_u); 1: off
    negative_prompt_ids: tuple[int, ...] = ()  # what l_u follows; empty: the prompt's last token alone

    def __post_init__(self) -> None:
        numbers = (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "guidance_scale",
        )  # fmt: skip
        for name in numbers:
            _check(math.isfinite(getattr(self, name)), f"{name} must be a finite number")
        _check(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 100,
            f"temperature must be 0 (greedy) or lie in {MIN_TEMPERATURE}..100, not {self.temperature}",
        )
        _check(self.top_k >= -1, f"top_k must be 0 (off) or positive, not {self.top_k}")
        _check(0 < self.top_p <= 1, f"top_p must lie above 0 and at most 1, not {self.top_p}")
        _check(0 <= self.min_p <= 1, f"min_p must lie in 0..1, not {self.min_p}")
        _check(
            0.01 <= self.repetition_penalty <= 100,
            f"repetition_penalty must lie in 0.01..100, not {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, f"{name} must lie in -2..2, not {getattr(self, name)}")
        _check(
            0 <= self.guidance_scale <= MAX_GUIDANCE,
            f"guidance_scale must lie in 0..{MAX_GUIDANCE:g} (1: off), not {self.guidance_scale}",
        )
        _check(0 <= self.seed < 2**64, f"seed must lie in 0..2^64-1, not {self.seed}")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _check(all(self.stop), "a stop string must not be empty")
        _check(all(abs(b) <= MAX_BIAS for b in self.logit_bias.values()), f"logit_bias must lie in +-{MAX_BIAS:g}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def guided(self) -> bool:
        """Whether the logits after the negative prompt play a part."""
        return self.guidance_scale != 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens are never drawn. At temperature 0 a filter changes nothing."""
        return not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)

    @property
    def penalised(self) -> bool:
        """Whether a row's logits depend on the tokens of its path."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PopulationConfig:
    """The shape of a population of particles (mode smc). Raises UserError on values that make none."""

    particles: int = 4  # N
    smc_draft_tokens: int = 4  # K, draft tokens per particle and round
    ess_threshold: float = 0.5  # resample below this share of N; 0: never
    power: float = 1.0  # alpha: the population follows p^alpha over whole texts
    smc_exact: int = 0  # leading draft tokens of a round that are verified exactly; K of them: nothing approximate

    def __post_init__(self) -> None:
        for name, most in (("particles", MAX_PARTICLES), ("smc_draft_tokens", MAX_TREE)):
            value = getattr(self, name)
            _check(1 <= value <= most, f"{name} must lie in 1..{most}, not {value}")
        _check(0 <= self.ess_threshold <= 1, f"ess_threshold must lie in 0..1, not {self.ess_threshold}")
        _check(0 < self.power <= MAX_POWER, f"power must lie above 0 and at most {MAX_POWER:g}, not {self.power}")
        most = self.smc_draft_tokens
        _check(
            0 <= self.smc_exact <= most,
            f"smc_exact must lie in 0..{most}, the draft tokens of a round, not {self.smc_exact}",
        )

    @property
    def slots(self) -> int:
        """Cache slots that a round hands out: one for each new token of each particle."""
        return self.particles * (self.smc_draft_tokens + 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The mode, the split of the ranks and the shape of the tree. Raises UserError on what makes no engine.

    In mode async the first `target_tp` ranks run the target and the `draft_tp` ranks after them the draft; 1 and 0 are
    one rank whose GPU runs both at the same time. In mode serial and mode smc one group runs both models in turn, so
    the two sizes are the same; in mode ar there is no draft.
    """

    mode: str = "serial"
    verify_batch: int = 8  # bs, nodes verified per round, the root counted
    draft_leaves: int = 8  # w, leaves expanded per expansion
    draft_steps: int | None = None  # d, expansions per round; None: 3, and in mode async measured at start-up
    verify: str = "match"  # by the target's own draws, or by rejection sampling
    proposal: str | None = None  # how the draft chooses children; None: as verify needs
    calibration: float | None = None  # of the children's weights; None: see `calibrated`
    catch_up: bool = True  # mode async: after a result expand on while that is worth its time; off: the paper's rule
    self_switch: bool = False  # go on without the draft while that is faster; rounds then depend on the clock
    adapt_steps: bool = False  # d follows what is measured while requests run; rounds then depend on the clock
    adapt_batch: bool = False  # so does bs, never above verify_batch
    target_tp: int = 1
    draft_tp: int = -1  # -1: as the mode has it (async 1, serial and smc that of the target, ar 0)
    population: PopulationConfig = PopulationConfig()  # mode smc

    def __post_init__(self) -> None:
        _check(self.mode in MODES, f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        for name in ("verify_batch", "draft_leaves", "draft_steps"):
            value = getattr(self, name)
            _check(value is None or 1 <= value <= MAX_TREE, f"{name} must lie in 1..{MAX_TREE}, not {value}")
        self._check_proposal()
        usual = {"ar": 0, "async": 1}.get(self.mode, self.target_tp)
        if self.draft_tp == -1:
            object.__setattr__(self, "draft_tp", usual)
        _check(self.target_tp >= 1, f"target_tp must be at least 1, not {self.target_tp}")
        if self.mode == "async":
            alone = self.draft_tp == 0 and self.target_tp == 1
            _check(self.draft_tp >= 1 or alone, f"draft_tp must be at least 1 in mode async, not {self.draft_tp}")
        else:
            _check(self.draft_tp == usual, f"draft_tp must be {usual} in mode {self.mode}, not {self.draft_tp}")

    def _check_proposal(self) -> None:
        _check(self.verify in VERIFY, f"verify must be one of {', '.join(VERIFY)}, not {self.verify!r}")
        if self.proposal is None:
            object.__setattr__(self, "proposal", "sample" if self.verify == "reject" else "coupled")
        _check(self.proposal in PROPOSALS, f"proposal must be one of {', '.join(PROPOSALS)}, not {self.proposal!r}")
        _check(
            self.verify == "match" or self.proposal == "sample",
            f"verify reject needs the distribution that tokens were drawn from, and proposal {self.proposal} carries"
            " none: take proposal sample, or verify match",
        )
        _check(
            self.verify == "match" or not self.adapts,
            "verify reject has a text that follows the tree, which must not follow the clock: leave adapt_* out",
        )
        value = self.calibration
        _check(value is None or 0.05 <= value <= 20, f"calibration must lie in 0.05..20, not {value}")

    def check_request(self, sampling: SamplingParams) -> None:
        """Raises UserError on a request that the tree cannot serve."""
        instead = "verify match" if self.verify == "reject" else "proposal top"
        _check(
            self.mode in ("ar", "smc") or self.proposal != "sample" or not sampling.greedy,
            f"proposal sample draws tokens, and temperature 0 leaves nothing to draw: raise it, or take {instead}",
        )

    def mismatch(self, sampling: SamplingParams) -> str | None:
        """Why fewer tokens of such a request are accepted than could be: draft and target sample in different ways."""
        if self.mode in ("ar", "smc") or sampling.greedy:
            return None
        if self.proposal == "top":
            return "proposal top does not see the noise that the target draws with: proposal coupled has more accepted"
        if self.proposal == "sample" and self.verify == "match":
            return (
                "draft and target draw with noise of their own each: verify reject, or proposal coupled, accepts more"
            )
        return None

    def calibrated(self, greedy: bool) -> float:
        """What makes a child's weight the chance that the target agrees. For children ranked by likelihood a
        temperature on the draft's log-probabilities, for drawn ones an exponent of its confidence. The defaults fit the
        embedded pair."""
        if self.calibration is not None:
            return self.calibration
        return CALIBRATION["greedy" if greedy else str(self.proposal)]

    @property
    def adapts(self) -> bool:
        """Whether the shape of a round follows measurements."""
        return self.adapt_steps or self.adapt_batch

    @property
    def children(self) -> int:
        """k, children kept per expanded leaf: as many as could all be verified or expanded next."""
        return max(self.verify_batch, self.draft_leaves)

    @property
    def steps(self) -> int:
        """d, or where it is to be measured, what to begin with."""
        return self.draft_steps if self.draft_steps is not None else DEFAULT_STEPS

    @property
    def ranks(self) -> int:
        """G, the ranks that the plan is for."""
        return self.target_tp + (self.draft_tp if self.mode == "async" else 0)


def split_ranks(
    mode: str, ranks: int, target_tp: int | None, draft_tp: int | None, *, gpu: bool = False
) -> tuple[int, int]:
    """(target_tp, draft_tp) for `ranks` ranks, where None is open. Raises UserError where it does not add up.

    One rank with a `gpu` may run both models at the same time, which is 1 and 0. With both open the draft gets a
    quarter of the ranks, since a small model gains little from more (paper, Table 1).
    """
    if mode != "async":
        _check(target_tp in (None, ranks), f"mode {mode} takes all {ranks} ranks for the target, not {target_tp}")
        usual = 0 if mode == "ar" else ranks
        _check(draft_tp in (None, usual), f"mode {mode} has no draft group of its own: leave --draft-tp out")
        return ranks, usual
    if gpu and ranks == 1 and target_tp in (None, 1) and draft_tp in (None, 0):
        return 1, 0
    _check(ranks >= 2, "mode async needs two ranks or more: start it with torchrun --standalone --nproc-per-node 2")
    if draft_tp is None:
        draft_tp = max(1, ranks // 4) if target_tp is None else ranks - target_tp
    if target_tp is None:
        target_tp = ranks - draft_tp
    _check(
        target_tp >= 1 and draft_tp >= 1 and target_tp + draft_tp == ranks,
        f"--target-tp {target_tp} and --draft-tp {draft_tp} do not add up to {ranks} ranks: take at least 1 each",
    )
    return target_tp, draft_tp
