"""Captures the CUDA graphs of a process before its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swiftspec.config import EngineConfig
from swiftspec.model.checkpoint_files import Progress
from swiftspec.runtime.executors.available import draft_captures, graph_captures, target_captures
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.verifier import LocalVerifier

CAPTURE_PHASE = "CUDA graphs"  # description that `Progress` receives


def capture_graphs(
    verifier: LocalVerifier | None,
    drafter: LocalDrafter | None,
    config: EngineConfig,
    progress: Progress | None,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Captures the graphs of a verifier and a drafter in this process; see `run_captures`."""
    captures = list[tuple[Runner, Callable[[], None]]]()
    if verifier is not None:
        captures += [(verifier.runner, capture) for capture in target_captures(verifier.executors, config)]
    if drafter is not None:
        found = draft_captures(drafter.executors, config, drafter.tree.slots)
        captures += [(drafter.runner, capture) for capture in found]
    run_captures(captures, progress, barrier)


def run_captures(
    captures: Sequence[tuple[Runner, Callable[[], None]]],
    progress: Progress | None,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Captures graphs, each with the runner of a model in it, so that no request waits for a capture, which also stops
    all other work on the GPU. No request may be open. Raises RankLost instead of a device error that another rank has
    caused.

    `barrier`: called before each capture; waits for the other ranks of the group, because captured forwards
    communicate.
    """
    for step, (runner, capture) in enumerate(captures):
        if progress is not None:
            progress(CAPTURE_PHASE, step, len(captures))
        barrier()
        with runner.translate_peer_errors():
            capture()


def num_captures(verifier: LocalVerifier | None, drafter: LocalDrafter | None) -> int:
    """Returns the number of graphs that the models in this process have captured."""
    return sum(graph_captures(role.executors) for role in (verifier, drafter) if role is not None)
