"""The native index of suffix lookup (csrc/host/decoder/suffix_index.h). It needs no operators, so it serves models on
any device."""

from __future__ import annotations

from swiftspec import _C

MAX_MATCH_TOKENS = _C.MAX_MATCH_TOKENS  # longer matches count as this long
NativeSuffixIndex = _C.SuffixIndex
