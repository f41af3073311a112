"""The kinds of drafters, without their code: how users select them, and how their nodes are marked.

`DRAFTERS` in builder/drafters.py has how they are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class NodeSource(IntEnum):
    """What added a node to a proposal. The values are part of the messages between processes."""

    ROOT = 0  # the last verified token, which is node 0 of every proposal
    DRAFT_MODEL = 1
    SUFFIX = 2  # suffix lookup (runtime/suffix_drafter.py)
    DRAFT_HEAD = 3  # a head that reads the target's hidden states (runtime/head_drafter.py)

    @property
    def label(self) -> str:
        """Name of the source in traces, metrics and statistics."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A value of `EngineConfig.drafter`.

    `title`: its name in messages.
    `feature`: its row in the capability table; None: it combines with everything.
    `model_free_source`: mark of the nodes of a drafter that runs no draft model, and whose name is also a value of
        `draft_model`; None: it runs one.
    `methods`: those of vLLM's `speculative_config` that stand for it, if it runs no model.
    """

    title: str
    feature: str | None = None
    model_free_source: NodeSource | None = None
    methods: tuple[str, ...] = ()


SUFFIX_LOOKUP = "suffix"
GRAFTED = "model+suffix"  # suffix lookup adds to the proposals of the draft model
MTP_HEAD = "mtp"  # value of `draft_model` that selects the MTP layer in the target's checkpoint
DRAFTER_KINDS = {
    "model": DrafterKind("a draft model"),
    SUFFIX_LOOKUP: DrafterKind("suffix lookup", "suffix lookup", NodeSource.SUFFIX, ("ngram", "ngram_gpu", "suffix")),
    GRAFTED: DrafterKind("a draft model and suffix lookup", "grafting"),
}
MODEL_FREE = frozenset(name for name, kind in DRAFTER_KINDS.items() if kind.model_free_source is not None)
DRAFTER_OF_FEATURE = {kind.feature: name for name, kind in DRAFTER_KINDS.items() if kind.feature is not None}
DRAFT_WORDS = MODEL_FREE | {MTP_HEAD}  # values of `draft_model` that are no models of their own
