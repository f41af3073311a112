"""What an answer must keep to, as a grammar of llguidance. Building one has no bound in time and memory: whoever calls
this for a stranger does it in a process that can be ended. So it imports nothing else."""

from __future__ import annotations

from llguidance import LLMatcher, grammar_from

KINDS = ("json_schema", "regex", "grammar", "choice", "lark")  # "grammar": Lark, or the GBNF of llama.cpp
ANY_OBJECT = '{"type":"object"}'  # the schema that `response_format: json_object` means
LONGEST = 300  # characters of a complaint


def grammar_of(kind: str, text: str) -> str:
    """The grammar for one of KINDS, as text that `LLMatcher` takes. "choice" takes a JSON list of texts. Raises
    ValueError, in one line, on what makes none."""
    if kind not in KINDS:
        raise ValueError(f"no such kind of grammar: {kind}")
    try:
        grammar = str(grammar_from(kind, text))  # pyright: ignore[reportArgumentType]
        complaint = LLMatcher.validate_grammar(grammar)
    except Exception as error:  # its converters raise anything on what they do not understand
        complaint = str(error) or type(error).__name__
    else:
        if not complaint:
            return grammar
    words = " ".join(complaint.split())
    raise ValueError(words if len(words) <= LONGEST else words[: LONGEST - 3] + "...")
