"""Banner of the chat."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from swiftspec.cli.terminal import ACCEPTED_STYLE, print_note
from swiftspec.drafter_kinds import DRAFTER_KINDS
from swiftspec.startup.session import Session

LARGER_PAIR = ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")


def show_banner(session: Session, console: Console, *, raw: bool) -> None:
    """Prints the models, the mode and hints. `raw`: whether text is continued without a chat template."""
    plan = session.llm.config
    target, draft = _short(session.model), _short(session.draft_model)
    if session.built_in is not None:
        target = session.built_in.title
        draft = None if session.draft_model == str(session.built_in.draft) else draft
    if session.built_in is not None and not session.built_in.completes_code:
        console.print(
            Text(
                "This model of 135M parameters is a toy, and often wrong. One that answers questions (download: 4 GB):"
                f"\n    swiftspec chat {LARGER_PAIR[0]} --draft-model {LARGER_PAIR[1]}",
                "bold",
            )
        )
    if session.built_in is not None and session.built_in.completes_code:
        console.print(
            Text(
                "This small code model completes code instead of chatting: type the beginning of some Python code,"
                " such as\n    def read_lines(path):",
                "bold",
            )
        )
    drafter = DRAFTER_KINDS[plan.drafter].title if plan.drafts_without_model else f"draft {draft}"
    pair = target if draft is None else f"{target}, {drafter}"
    ranks = (
        "" if plan.num_ranks == 1 else f" on {plan.target_tp} + {plan.draft_tp} ranks, d = {plan.initial_draft_steps}"
    )
    ranks = ranks if plan.mode == "async" or not ranks else f" on {plan.num_ranks} ranks"
    print_note(
        console,
        f"{pair}; mode {plan.mode}{ranks}, {session.dtype}, {session.threads} threads,"
        f" context {session.llm.max_model_len}" + (", raw: no chat template" if raw else ""),
    )
    if plan.mode == "smc":
        population = plan.population
        print_note(
            console,
            f"Answers are approximate: one of {population.particles} particles, each extended by"
            f" {population.smc_draft_tokens} draft tokens and one target token per round. Until the end only their"
            " common prefix is shown.",
        )
    elif plan.mode != "ar":
        sample = Text("Accepted draft tokens look ", "dim")
        console.print(sample + Text("like this", ACCEPTED_STYLE) + Text(".", "dim"))
        if session.built_in is not None and session.built_in.copying_prompt is not None:
            print_note(
                console,
                "Speculation is fastest where an answer repeats the prompt, as in edits:"
                f" {session.built_in.copying_prompt}",
            )
    print_note(console, "/help shows the commands. Ctrl-C stops an answer, Ctrl-D exits.")


def _short(name: str | None) -> str | None:
    """Returns the last two parts of a path; a hub id is unchanged."""
    return None if name is None else "/".join(name.rstrip("/").split("/")[-2:])
