"""Command /race of the chat: decodes a prompt without and with the draft on the same engine; compares speed and
text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from swiftspec.capabilities import check_features
from swiftspec.config import EngineConfig
from swiftspec.serve import answer_stats
from swiftspec.serve.terminal import Interrupt, Painter, print_note
from swiftspec.settings.settings import Settings
from swiftspec.startup.session import Session

MAX_ANSWER_TOKENS = 256  # token limit of an answer if the settings have none
LABEL_WIDTH_CHARS = 11  # "speculative"
BAR_WIDTH_CHARS, MIN_BAR_WIDTH_CHARS = 40, 8  # length of the faster run's bar, in a wide and in a narrow terminal


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Result of one of the two runs, which has at least one token. `seconds`: from the end of the prefill to the last
    token. `tokens_per_round`: as in the statistics of an answer."""

    name: str
    tokens: Sequence[int]
    seconds: float
    tokens_per_round: float
    drafter_lost: str | None  # the reason, if the draft was lost

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / max(self.seconds, 1e-9)


def race(
    session: Session, settings: Settings, prompt: Sequence[int], console: Console, interrupt: Callable[[], Interrupt]
) -> None:
    """Decodes `prompt` without and with the draft, shows both answers and compares them. Ctrl-C ends the race. Raises
    UserError in a mode without a draft tree.

    `interrupt`: creates the Ctrl-C handler of each answer.
    """
    plan, results = session.llm.config, list[RaceResult]()
    check_features({"race", f"mode {plan.mode}"})
    for name, bs in (("plain", 1), ("speculative", None)):
        print_note(console, f"{name}:", "bold")
        with interrupt() as guard:
            result = _run(
                session=session,
                settings=settings,
                prompt=prompt,
                painter=Painter(console),
                guard=guard,
                name=name,
                bs=bs,
            )
        if result is None:
            print_note(console, "the race was stopped")
            return
        results.append(result)
    for line in compare_results(results[0], results[1], plan, console.width):
        print_note(console, line, "")
    console.print()


def _run(
    session: Session,
    settings: Settings,
    prompt: Sequence[int],
    painter: Painter,
    guard: Interrupt,
    name: str,
    bs: int | None,
) -> RaceResult | None:
    """Decodes and shows one answer. Returns None if Ctrl-C ended it. `bs`: nodes per round; 1: without the draft, None:
    as configured."""
    limit = session.sampling_params(settings).max_tokens or MAX_ANSWER_TOKENS
    # an earlier answer to the same prompt, which suffix lookup would copy, would make speculation look too fast
    overrides = {"verify_batch": bs, "max_tokens": limit, "suffix_memory": False}
    stream = session.answer(prompt, settings, guard.until_pressed, **overrides)
    try:
        for piece in stream:
            painter.write(piece.text, piece.accepted)
    except KeyboardInterrupt:
        pass  # during the prefill, or pressed twice
    painter.write("" if stream.text.endswith("\n") else "\n", False)
    stats = session.llm.stats
    stats.keep_tokens(len(stream.token_ids))
    tokens_per_round = answer_stats.mean_acceptance_length(stats)
    lane = RaceResult(name, stream.token_ids, stats.decode_time, tokens_per_round, stats.drafter_lost)
    return lane if stream.finish_reason is not None else None


def compare_results(plain: RaceResult, fast: RaceResult, plan: EngineConfig, width: int) -> list[str]:
    """Returns lines that compare speed and text of the two runs. `width`: cells of the terminal, which the bars are
    fitted to."""
    most, lines = max(plain.speed, fast.speed), list[str]()
    details = [
        f"{answer_stats.format_speed(lane.speed):>10}  ({len(lane.tokens)} tok in {lane.seconds:.2f} s,"
        f" {lane.tokens_per_round:.1f} tok/round)"
        for lane in (plain, fast)
    ]
    longest = min(max(width - LABEL_WIDTH_CHARS - 4 - max(map(len, details)), MIN_BAR_WIDTH_CHARS), BAR_WIDTH_CHARS)
    for lane, detail in zip((plain, fast), details):
        bar = "█" * max(round(longest * lane.speed / most), 1)
        lines.append(f"{lane.name:{LABEL_WIDTH_CHARS}}  {bar:{longest}}  {detail}")
    first, second = sorted((fast, plain), key=lambda lane: -lane.speed)
    faster = f"{first.name} is {first.speed / second.speed:.2f} times as fast"
    lines.append(f"{faster}; {_compare_texts(plain, fast, plan)}")
    if fast.drafter_lost is not None:
        lines.append(f"the drafter was lost ({fast.drafter_lost}); decoding continued without it")
    return lines


def _compare_texts(plain: RaceResult, fast: RaceResult, plan: EngineConfig) -> str:
    """Returns a clause on whether the tokens of the two runs are equal."""
    if list(plain.tokens) == list(fast.tokens):
        return f"the text is the same: all {len(plain.tokens)} tokens are equal"
    if plan.synthetic_acceptance_length is not None:
        return "with synthetic acceptance the speculative text is not the target's"
    if plan.verify == "reject":
        return "with verify reject the texts differ; their distribution is the same"
    apart = next((i for i, (a, b) in enumerate(zip(plain.tokens, fast.tokens)) if a != b), None)
    at = min(len(plain.tokens), len(fast.tokens)) if apart is None else apart
    return f"THE TEXTS DIFFER from token {at + 1} on"
