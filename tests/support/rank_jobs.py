"""The jobs of the ranks of tests/support/ranks.py. Arguments and results are JSON."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.builder.load_options import LoadOptions, Side
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.control import policy
from swiftspec.control.draft_budget import DraftBudget
from swiftspec.control.round_stats import Decision, RoundStats
from swiftspec.distributed.collectives.shm import SharedMemoryGroup
from swiftspec.distributed.launch.world import join_world
from swiftspec.distributed.remote import failover
from swiftspec.distributed.remote.session_messages import unpack_error
from swiftspec.distributed.transport.codec import pack_message
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.engine import TokenChunk
from swiftspec.errors import NonFiniteLogits, UserError
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.messages import RequestStart, SampledLogprob
from swiftspec.model.loader import load_model
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import TreeExecutor, available
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.tree.tree import DraftTree
from tests.support.proposals import draft_proposal
from tests.support.roles import make_runner
from tests.support.workers import RawClient, StartedWorker, client_on_workers

Json = dict[str, Any]


def sampling_from(values: Json) -> SamplingParams:
    """Restores types that JSON changes: keys of a bias are strings, tuples are lists."""
    bias = {int(token): value for token, value in values.get("logit_bias", {}).items()}
    negative = tuple(values.get("negative_prompt_ids", ()))
    return SamplingParams(**{**values, "logit_bias": bias, "negative_prompt_ids": negative})


def decode(
    target: str,
    draft: str | None,
    plan: Json,
    requests: Sequence[tuple[list[int], Json]],
    dtype: str = "float64",
    draft_fails_at: int | None = None,
    engines: int = 1,
    by_dice: float | None = None,
    together: bool = False,
    **options: Any,
) -> list[Json] | None:
    """Decodes the requests sequentially, or as one batch, with a number of successive engines: rank 0 returns the
    answers of the last one."""
    world = join_world()
    if "population" in plan:
        plan = plan | {"population": PopulationConfig(**plan["population"])}
    options["dtype"] = getattr(torch, dtype)
    if "trace" in options:
        options["trace"] = Path(options["trace"])
    target = target.format(rank=world.rank if world is not None else 0)
    try:
        if world is not None and world.rank > 0:
            for _ in range(engines):
                with _failing_at(draft_fails_at):
                    serve_rank(world, target, draft, EngineConfig(**plan), **options)
            return None
        for _ in range(engines - 1):
            LLMEngine(target, draft, EngineConfig(**plan), world=world, **options).close()
        llm = LLMEngine(target, draft, EngineConfig(**plan), world=world, **options)
    except UserError as error:
        return [{"refused": str(error)}]
    try:
        with switched_by_dice(by_dice), _without_timeouts():
            if together:
                return batch(llm, requests)
            return [answer(llm, prompt, dict(values)) for prompt, values in requests]
    finally:
        llm.close()


def decode_on_group(
    side: Side, model: str, other: str, plan: Json, requests: Sequence[tuple[list[int], Json]], more_on: int = -1,
    renamed: Sequence[int] = (),
) -> list[Any] | None:  # fmt: skip
    """A worker on all ranks, whose rank 0 also decodes on it: two sessions that alternate round by round. `more_on`: a
    rank that has an executor that the others lack. `renamed`: tokens to which the clients' targets give other names."""
    worker = StartedWorker(side, Path(model), world=join_world(), added_tokens=dict.fromkeys(renamed, "<name>"))
    assert worker.world is not None
    if worker.world.rank == more_on:
        with _with_faster_executor():
            return _decode_on_group(worker, other, plan, requests)
    return _decode_on_group(worker, other, plan, requests)


def _decode_on_group(
    worker: StartedWorker, other: str, plan: Json, requests: Sequence[tuple[list[int], Json]]
) -> list[Any] | None:
    assert worker.world is not None
    if worker.world.rank > 0:
        worker.load().follow()
        return None
    worker.start()
    models = (
        (worker.client_address(), Path(other)) if worker.side == "target" else (Path(other), worker.client_address())
    )
    if worker.added_tokens:
        others = VocabularyIdentity(worker.tokenizer.hex(), dict.fromkeys(worker.added_tokens, "<other>"), 64)
        models = (models[0], replace(worker.client_address(), vocabulary=others))
    try:
        clients = client_on_workers(*models, **plan), client_on_workers(*models, **plan)
        with _without_timeouts(), clients[0] as one, clients[1] as two:
            found = []
            for prompt, values in requests:
                streams = [llm.stream(prompt, sampling_from(values)) for llm in (one, two)]
                texts: list[list[int]] = [[], []]
                while any(chunks := [next(stream, None) for stream in streams]):
                    for text, chunk in zip(texts, chunks, strict=True):
                        text.extend(chunk.token_ids if chunk is not None else ())
                found.append([*texts, [llm.stats.drafter_lost for llm in (one, two)], one.stats.accepted])
            return found
    finally:
        worker.stop()


def refuse_on_group(side: Side, model: str) -> list[str] | None:
    """Errors of rank 0 of a worker on all ranks for invalid request starts, each followed by a valid one."""
    worker = StartedWorker(side, Path(model), world=join_world())
    assert worker.world is not None
    if worker.world.rank > 0:
        worker.load().follow()
        return None
    worker.start()
    client = RawClient(worker, EngineConfig("serial", draft_steps=2))
    text, most, errors = (5, 17, 3), client.info.max_model_len, list[str]()
    client.attach()
    starts = [
        RequestStart(1, text, SamplingParams(temperature=0, grammar='start: "x"'), 3),
        RequestStart(1, (5,) * (most + 1), SamplingParams(temperature=0), 3),
        RequestStart(
            1, (*text, *(5,) * 24), SamplingParams(guidance_scale=2.0, negative_prompt_ids=(5,) * (most - 1)), 3
        ),
        RequestStart(1, text, SamplingParams(temperature=0), 3),
    ]
    try:
        for start in starts:
            kind, words = client.ask(
                Opcode.VERIFIER_OPEN if side == "target" else Opcode.DRAFTER_OPEN, pack_message(start)
            )
            if kind != Opcode.ERROR and side == "target":
                proposal = draft_proposal(1, 0, len(start.tokens) - 1, (start.tokens[-1], 9), (-1, 0))
                kind, words = client.ask(Opcode.VERIFY, pack_message(proposal))
            errors.append(unpack_error(words)[-1] if kind == Opcode.ERROR else "")
        client.close()
        return errors
    finally:
        worker.stop()


def logits(model: str, tokens: list[int], dtype: str = "float64", native: bool = False, fused: bool = True) -> Json:
    """The logits after some tokens, gathered from the ranks of one group, and their bits. `fused`: native operators as
    one call, if supported."""
    world, group = join_world(), None
    if world is not None:
        wires = {"spin": False, "timeout": timedelta(seconds=30)}
        group = SharedMemoryGroup.join(world.store, "logits", world.rank, world.size, **wires)
    ops = host if native else reference
    whole = load_model(model, dtype=getattr(torch, dtype), ops=ops, max_positions=64, group=group)
    if not fused:
        whole.fused = None
    runner = make_runner(whole, ops, context=32, tree_slots=1)
    rows = runner.logits(runner.chain_batch(tokens))[-1:]
    if group is not None:
        rows = group.all_gather(rows).transpose(0, 1).flatten(1)
        group.close()
    rows = rows[:, : whole.spec.vocab_size]
    return {"values": rows[0].tolist(), "bits": rows.numpy().tobytes().hex()}


@contextmanager
def _with_faster_executor() -> Iterator[None]:
    """Adds a faster executor to the models of this rank."""

    class Faster(EagerExecutor):
        name = "faster"

    target, draft = available.target_executors, available.draft_executors

    def for_draft(runner: Runner, tools: ExecutorDeps, config: EngineConfig) -> tuple[list[TreeExecutor], DraftTree]:
        steps, tree = draft(runner, tools, config)
        return [Faster(runner), *steps], tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "target_executors", lambda runner, tools: [Faster(runner), *target(runner, tools)])
        patch.setattr(available, "draft_executors", for_draft)
        yield


@contextmanager
def _without_timeouts() -> Iterator[None]:
    """Disables the timeout of the draft group, for busy machines."""
    limits = failover.FIRST_PROPOSAL_TIMEOUT_S, failover.MIN_TIMEOUT_S, failover.MAX_TIMEOUT_S
    failover.FIRST_PROPOSAL_TIMEOUT_S = failover.MIN_TIMEOUT_S = failover.MAX_TIMEOUT_S = 60.0
    try:
        yield
    finally:
        failover.FIRST_PROPOSAL_TIMEOUT_S, failover.MIN_TIMEOUT_S, failover.MAX_TIMEOUT_S = limits


@contextmanager
def switched_by_dice(chance: float | None) -> Iterator[None]:
    """Replaces the decisions of the policy in every round, d and bs included, by random ones with that probability,
    whatever the draft costs."""
    decide, settle, draw = policy.decide, DraftBudget.settle, random.Random(3)

    def by_dice(measured: RoundStats) -> Decision:
        if draw.random() >= (chance or 0):
            return measured.current
        return Decision(draw.randint(1, 6), draw.choice((8, 5, 2)), not measured.speculating or draw.random() < 0.3)

    if chance is not None:
        policy.decide, DraftBudget.settle = by_dice, lambda self, gain: None
    try:
        yield
    finally:
        policy.decide, DraftBudget.settle = decide, settle


def answer(llm: LLMEngine, prompt: list[int], values: Json) -> Json:
    """Decodes a prompt. Key `cut` of the values closes the answer after that many rounds, `looks` after that many polls
    during the prefill."""
    cut, looks, tokens, reason = values.pop("cut", None), values.pop("looks", None), list[int](), None
    likelihoods: list[SampledLogprob] = []
    had: list[None] = []

    def cancelled() -> bool:
        had.append(None)
        return looks is not None and len(had) > looks

    try:
        for count, chunk in enumerate(stream := llm.stream(prompt, sampling_from(values), cancelled), 1):
            tokens, reason = tokens + list(chunk.token_ids), chunk.finish_reason
            likelihoods += (*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ()))
            if count == cut:
                stream.close()
    except NonFiniteLogits as error:
        return {"refused": str(error)}
    stats = llm.stats
    return {
        "tokens": tokens,
        "likelihoods": [(likelihood.logprob, *likelihood.top) for likelihood in likelihoods],
        "looks": len(had),
        "reason": reason,
        "kept": stats.cached_tokens,
        "rounds": stats.rounds,
        "lost": stats.drafter_lost,
        "plain_rounds": stats.policy and stats.policy.ar_rounds,
        "busy": stats.target_busy_time / max(stats.decode_time, 1e-9),
        "draft_busy": stats.draft_busy_time,
        "steps": llm.config.draft_steps,
        "megabytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6,
    }


def batch(llm: LLMEngine, requests: Sequence[tuple[list[int], Json]]) -> list[Json]:
    """Like `answer`, for all requests concurrently; one with `cut` is cancelled after that many chunks."""
    cuts = [values.pop("cut", None) for _, values in requests]
    chunks: list[list[TokenChunk]] = [[] for _ in requests]

    def cancelled(index: int) -> bool:
        return cuts[index] is not None and len(chunks[index]) >= cuts[index]

    prompts, sampling = [prompt for prompt, _ in requests], [sampling_from(values) for _, values in requests]
    for index, chunk in llm.stream_batch(prompts, sampling, cancelled):
        chunks[index].append(chunk)
    return [
        {"tokens": [token for chunk in each for token in chunk.token_ids], "reason": each[-1].finish_reason}
        for each in chunks
    ]


@contextmanager
def _failing_at(call: int | None) -> Iterator[None]:
    """Makes the `call`-th expansion of this process fail."""
    expand, calls = LocalDrafter.expand, 0
    if call is None:
        yield
        return

    def failing(self: LocalDrafter, count: int = 1) -> None:
        nonlocal calls
        for _ in range(count):
            calls += 1
            if calls == call:
                raise RuntimeError("the draft model broke")
            expand(self)

    LocalDrafter.expand = failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalDrafter.expand = expand  # type: ignore[method-assign]


def profile(argv: list[str]) -> int:
    """The profile command, on every rank."""
    import sys

    from swiftspec.lab.profile import main

    out, sys.stdout = sys.stdout, sys.stderr
    try:
        return main(argv)
    finally:
        sys.stdout = out


def split_decode(argv: list[str]) -> Json | None:
    """The command bench.gpu.step with --split, on every rank: rank 0 returns its result."""
    import sys

    from bench.gpu import step

    results: list[Json] = []
    measured = step.measure_split

    def keep(*args: Any) -> Json | None:
        found = measured(*args)
        results.extend([] if found is None else [found])
        return found

    out, before, sys.stdout, sys.argv = sys.stdout, sys.argv, sys.stderr, ["step", *argv]
    step.measure_split = keep
    try:
        step.main()
    finally:
        step.measure_split, sys.stdout, sys.argv = measured, out, before
    return results[0] if results else None


def paced(emulate: str, plans: list[Json], prompts: list[list[int]], max_tokens: int) -> list[Json] | None:
    """The demo models with emulated step times, one plan after the other: rank 0 returns the speed of each, and the
    rounds of a run without emulation."""
    import tempfile

    from swiftspec.lab import measurement
    from swiftspec.lab.round_costs import Trace
    from swiftspec.lab.worker_pool import EngineBuild, Pair, RankPool
    from swiftspec.profiles import emulation

    world, demo = join_world(), Path(__file__).parents[2] / "swiftspec" / "demo"
    options: LoadOptions = {"dtype": torch.bfloat16, "emulate": emulation.parse_emulation(emulate)}
    pool = RankPool(Pair(demo / "target", demo / "draft", options, threads=1), world)
    if world is not None and world.rank > 0:
        pool.follow()
        return None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans:
            with pool.engine(EngineBuild(EngineConfig(**plan))) as llm:
                speed = measurement.decode_all(llm, prompts, max_tokens).speed
            file = f"{folder}/rounds.jsonl"
            with pool.engine(EngineBuild(EngineConfig(**plan), paced=False, trace=file)) as llm:
                measurement.decode_all(llm, prompts, max_tokens)
            found.append({"speed": speed, "rounds": measurement.rounds_of(Trace.read(Path(file)))})
    pool.dismiss()
    return found
