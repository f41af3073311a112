"""Access to the drafter and the verifier of a single-process engine, and their replacement."""

from __future__ import annotations

from typing import TypeVar

from swiftspec.builder.roles import TreeRoles
from swiftspec.config import EngineConfig
from swiftspec.engine import TreeDecoding
from swiftspec.llm_engine import LLMEngine
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.verifier import LocalVerifier, Verifier
from swiftspec.tree.children import ChildSelector, TopChildren
from swiftspec.tree.sampled_children import SampledChildren

Ahead = TypeVar("Ahead", bound=LookaheadDrafter)


def local_roles(llm: LLMEngine) -> tuple[LocalDrafter, LocalVerifier]:
    """Returns the drafter and the verifier of an engine in serial mode."""
    parts = llm.roles.inner_roles
    assert isinstance(parts, TreeRoles)
    assert isinstance(parts.drafter, LocalDrafter) and isinstance(parts.verifier, LocalVerifier)
    return parts.drafter, parts.verifier


def local_verifier(llm: LLMEngine) -> LocalVerifier:
    """Returns the verifier of an engine without a draft or in serial mode."""
    parts = llm.roles.inner_roles
    assert isinstance(parts, TreeRoles) and isinstance(parts.verifier, LocalVerifier)
    return parts.verifier


def decode_on(llm: LLMEngine, drafter: Drafter, verifier: Verifier) -> None:
    """Makes an engine decode with this drafter and verifier."""
    safe = FallbackDrafter(drafter)
    llm.decoding = TreeDecoding(safe, verifier)


def growing_ahead(drafter: LocalDrafter, config: EngineConfig, kind: type[Ahead]) -> Ahead:
    """Builds a lookahead drafter of class `kind` on the tree and the executors of `drafter`.

    The two drafters must not be used concurrently. `config`: its tree shape must equal that of `drafter`, except for d.
    """
    runner = drafter.runner
    children: ChildSelector = TopChildren(config.children_per_leaf, config.proposal == "coupled")
    if config.proposal == "sample":
        children = SampledChildren(
            config.children_per_leaf, runner.tree_slots, runner.vocab, carry=config.verify == "reject"
        )
    return kind(runner, drafter.executors, drafter.tree, children, config)
