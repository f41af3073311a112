"""Whether a compiled grammar accepts a text."""

from __future__ import annotations

import llguidance


def accepts(grammar: str, text: str) -> bool:
    """Whether llguidance accepts the whole text, byte by byte."""
    matcher, data = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
