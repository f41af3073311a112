"""`python -m bench.exactness`: draws many answers with and without speculation and compares their distributions.

Exit codes: 0 no difference found; 1 a difference found, nothing tested because the draft was lost or none of its tokens
accepted, or a runtime error; 2 usage error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swiftspec.serve.__main__ import exit_process, join_launched_world, run_guarded

if TYPE_CHECKING:
    from rich.progress import Progress

    from bench.exactness.trial import CountingEngine, SampleVerdict, TextComparison
    from swiftspec.settings.settings import Settings
    from swiftspec.startup.session import Session

PROMPT = "def read"
OTHER_PROMPTS = ("class Parser:", "import os", "The first", "for i in range(", "# How to", "if not", "Once upon a time")
ABOUT = """\
Tests with your own models that speculation is lossless: samples many short answers with and without it and compares
the distributions of each token and of each two successive tokens (chi-square test with Holm's correction; total
variation with its 95 % interval), then compares greedy answers token by token. The false-positive rate is 1 in 1,000
runs. All other flags are those of `python -m swiftspec.serve`, such as --model, --draft-model, --mode, --verify,
and --temperature. Decoding without the draft (--speculative-config.self_switch) is off by default, since it would test
nothing. --speculative-config.graft_suffix false tests the draft model alone: answers to one prompt resemble each other,
so that suffix lookup proposes many of their tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on this rank and returns its exit code. Several ranks: torchrun -m bench.exactness ..."""
    return run_guarded(lambda first: _run(argv, first))


def _run(argv: Sequence[str] | None, first: bool) -> int:
    from swiftspec.capabilities import features_in
    from swiftspec.cli.arguments import CommandParser, parse_command
    from swiftspec.cli.generate import read_prompt
    from swiftspec.settings.settings import UsageError, check_usage

    parser = CommandParser(
        "python -m bench.exactness",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--samples", type=int, default=2000, help="answers per engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens per sampled answer (default: %(default)s)")
    parser.add_argument("--greedy-tokens", type=int, default=64, help="tokens per greedy answer (default: %(default)s)")
    own, rest = parser.parse_known_args(argv)
    command = parse_command(rest)
    settings = command.settings
    if "self_switch" not in settings.model_fields_set:
        settings = settings.model_copy(update={"self_switch": False})
    for name in ("samples", "tokens", "greedy_tokens"):
        if getattr(own, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(own, name)}")
    found = {
        "exactness test": True,
        f"mode {settings.mode}": True,
        "synthetic acceptance": settings.synthetic_acceptance_length is not None,
        "JSON output": command.json,
    }
    check_usage(features_in(found))
    given = command.prompt is not None or command.prompt_file is not None
    prompt = (read_prompt(command) if given else None) or PROMPT
    if not first:
        from swiftspec.startup.session import run_follower_rank

        world = join_launched_world()
        assert world is not None
        run_follower_rank(settings, world)
        return 0
    return _test(own, settings, prompt)


def _test(own: argparse.Namespace, settings: Settings, prompt: str) -> int:
    """Builds an engine with and one without speculation, compares them, prints a table and returns the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    from bench.exactness.trial import CountingEngine
    from swiftspec.cli.terminal import StartupProgress
    from swiftspec.settings.settings import UsageError
    from swiftspec.startup.session import open_session

    world = join_launched_world()
    phases = StartupProgress()
    try:
        tree = open_session(settings, phases, world)
        alone = settings.model_copy(update={"mode": "ar", "target_tp": None, "draft_tp": None, "plan": "none"})
        plain = open_session(alone, StartupProgress(quiet=True))
    finally:
        phases.close()
    if tree.llm.config.mode not in ("serial", "async"):
        drafted = settings.draft_model is not None or tree.built_in is not None
        no_draft = "there is no draft model; specify one with --draft-model"
        why = "the profile's best plan is mode ar; use --plan none" if drafted else no_draft
        raise UsageError(f"nothing to test: {why}")
    tested = CountingEngine(tree.llm)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        verdict, texts = _trials(own, plain, tree, tested=tested, settings=settings, prompt=prompt, progress=progress)
    for session in (tree, plain):
        session.close()
    return _report(tree, tested, verdict, texts)


def _trials(
    own: argparse.Namespace,
    plain: Session,
    tree: Session,
    *,
    tested: CountingEngine,
    settings: Settings,
    prompt: str,
    progress: Progress,
) -> tuple[SampleVerdict | None, list[TextComparison]]:
    """Compares the engine with speculation, `tree`, with the one without, `plain`.

    Returns the comparison of the sampled distributions (None for greedy requests), and the comparisons of the texts
    that must be equal token by token. `tested` is the engine of `tree`, wrapped.
    """
    from bench.exactness.trial import compare_samples, compare_texts

    plan = tree.llm.config
    sampling = replace(plain.sampling_params(settings), max_tokens=own.tokens)
    plan.check_request(sampling)
    tokens = plain.encode(prompt, settings)
    prompts = [tokens, *(plain.encode(text, settings) for text in OTHER_PROMPTS)]
    verdict, texts = None, []
    if not sampling.greedy:
        task = progress.add_task("answers", total=2 * own.samples)
        verdict = compare_samples(plain.llm, tested, tokens, sampling, own.samples, lambda: progress.advance(task))
    long = replace(sampling, max_tokens=own.greedy_tokens, ignore_eos=True, stop=(), stop_token_ids=())
    same = [("greedy", replace(long, temperature=0.0))] if plan.proposal != "sample" else []
    if plan.verify == "match" and not sampling.greedy:
        same.append(("sampled, same seed", long))
    for name, asked in same:
        task = progress.add_task(name, total=len(prompts))
        texts.append(compare_texts(name, plain.llm, tested, prompts, asked, lambda task=task: progress.advance(task)))
    return verdict, texts


def _report(tree: Session, tested: CountingEngine, verdict: SampleVerdict | None, texts: list[TextComparison]) -> int:
    """Prints the table and the verdict. Returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    from bench.exactness.trial import SIGNIFICANCE_LEVEL

    out, plan = Console(), tree.llm.config
    out.print(
        f"mode {plan.mode}, verify {plan.verify}, proposal {plan.proposal}, {plan.num_ranks} rank(s), {tree.dtype}"
    )
    sources = ", ".join(f"{source.label} {count}" for source, count in sorted(tested.by_source.items()))
    by_source = f" ({sources})" if len(tested.by_source) > 1 else ""
    out.print(f"{tested.accepted} draft tokens were accepted in {tested.rounds} rounds{by_source}")
    same = all(not text.parted for text in texts)
    if verdict is not None:
        same = same and verdict.same
        table = Table("compared", "cells", "chi2", "p", "Holm", "TV", "95 %", box=None)
        for c, p in zip(verdict.comparisons, verdict.corrected, strict=True):
            span = f"{c.low:.3f} .. {c.high:.3f}"
            table.add_row(c.name, str(c.cells), f"{c.square:.1f}", f"{c.p:.4f}", f"{p:.4f}", f"{c.apart:.3f}", span)
        out.print(table)
    for text in texts:
        where = f"; first difference at token {min(text.parted) + 1}" if text.parted else ""
        out.print(f"{text.name}: {text.requests - len(text.parted)} of {text.requests} answers are identical{where}")
    if not same:
        out.print(f"DIFFERENT: speculation changes the output (significance level {SIGNIFICANCE_LEVEL})")
        if tree.dtype != "float64" and (verdict is None or verdict.same):
            out.print(f"rounding in {tree.dtype} can change single answers; use --dtype float64 to rule this out")
    else:
        out.print("no difference found" if tested.idle is None else f"NOT TESTED: {tested.idle}")
    return 0 if same and tested.idle is None else 1


if __name__ == "__main__":
    exit_process(main())
