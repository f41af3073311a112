"""Generates csrc/host/decoder/message_layout.h, the layout of packed proposals and results in C++.

    python -m tools.message_layout

The layout is that of swiftspec/distributed/transport/codec.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swiftspec.distributed.transport import codec
from swiftspec.messages import NodeSource

FILE = Path(__file__).resolve().parents[1] / "csrc" / "host" / "decoder" / "message_layout.h"
TEMPLATE = """\
// Layout of packed proposals and results: a header, then columns of kCount 32-bit words each. Made by
// `python -m tools.message_layout` from swiftspec/distributed/transport/codec.py and swiftspec/drafter_kinds.py.
#pragma once

#include <cstdint>

namespace swiftspec::host {{

enum HeaderWord : uint8_t {{ {header}, kHeaderWords }};
enum ProposalColumn : uint8_t {{ {proposal}, kProposalColumns }};
enum ResultColumn : uint8_t {{ {result}, kResultColumns }};

// What added a node to a proposal.
enum class NodeSource : int32_t {{ {sources} }};

}}  // namespace swiftspec::host
"""


def header_text() -> str:
    """Returns the text of the header."""
    return TEMPLATE.format(
        header=_constants("", codec.HEADER),
        proposal=_constants("Proposal", codec.PROPOSAL_COLUMNS),
        result=_constants("Result", codec.RESULT_COLUMNS),
        sources=", ".join(f"{_constants('', [source.label])} = {source.value}" for source in NodeSource),
    )


def _constants(prefix: str, names: Iterable[str]) -> str:
    return ", ".join(f"k{prefix}{name.title().replace('_', '')}" for name in names)


if __name__ == "__main__":
    FILE.write_text(header_text(), encoding="utf-8")
