"""The plan of a job: what runs where, with which shapes."""

from __future__ import annotations

from pathlib import Path

from swiftspec.config import MTP_HEAD, SUFFIX_LOOKUP
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.head_loader import head_config


def block_size(target: str | Path, draft: str | Path | None) -> int | None:
    """Returns the number of positions that one forward of the draft drafts, if it is a block head, else None."""
    if draft is None or str(draft) == SUFFIX_LOOKUP:
        return None
    config = head_config(None, Path(target)) if str(draft) == MTP_HEAD else read_config(draft)
    head = config.spec.draft_head
    return None if head is None or head.block is None else head.block.size - 1
