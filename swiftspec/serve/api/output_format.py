"""Output format of a conversation: the parser of the output, the special tokens it needs, and the grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftspec.sampling.grammar_process import lenient
from swiftspec.serve.api.sampling import GrammarRequest
from swiftspec.serve.errors import ApiError, unsupported
from swiftspec.serve.format.conversation import Conversation
from swiftspec.serve.format.harmony import HarmonyParser, harmony_grammar
from swiftspec.serve.format.output_parser import MarkupParser, OutputParser
from swiftspec.serve.format.reasoning import ReasoningParser
from swiftspec.serve.format.template_format import TemplateFormat
from swiftspec.serve.format.tool_format import ToolCallFormat
from swiftspec.serve.format.tool_grammar import tool_call_grammar
from swiftspec.serve.format.tool_parser import AllowedText, ToolCallParser
from swiftspec.text.codec import TextCodec
from swiftspec.text.harmony import ChannelParser, HarmonyCodec, harmony_markers

ANSWER_FORMATS = ("response_format", "text.format", "output_config.format")  # constrain the answer, but not tool calls
MAX_PROMPT_END_TOKENS = 32  # in which the marker is that opens reasoning


@dataclass(frozen=True, slots=True)
class ConversationOutput:
    """How the output of a conversation is constrained and parsed.

    `grammar`: constraint of the whole output; None if there is none.
    `marker_tokens`: special tokens that are detokenized because the parser searches for their text.
    `harmony`: characters of the markers of harmony by token id; empty for other formats.
    `has_calls`: whether the output can have tool calls.
    """

    parser: OutputParser
    grammar: GrammarRequest | None
    marker_tokens: frozenset[int] = frozenset()
    harmony: Mapping[int, str] = field(default_factory=dict)
    has_calls: bool = False


def conversation_output(
    codec: TextCodec,
    format: TemplateFormat,
    conversation: Conversation,
    prompt: Sequence[int],
    grammar: GrammarRequest | None,
    keep_cut_call: bool,
) -> ConversationOutput:
    """Returns how the output is constrained and parsed, in the format that the chat template and the vocabulary show.
    Raises ApiError on constraints that exclude each other, and on tools if their format is unknown.

    `format`: of the chat template.
    `prompt`: token ids.
    `grammar`: constraint that the request contains. A tool that must be called replaces a format of the answer.
    `keep_cut_call`: whether the output has a tool call whose arguments a limit cut: in harmony always, in other formats
        if a tool must be called.
    """
    template = codec.template_source(conversation.tools or None)
    if markers := harmony_markers(codec, template):
        return _harmony_output(codec, conversation, prompt, grammar, keep_cut_call, markers)
    tool_format = _tool_format(conversation, format)
    allowed: AllowedText = "any"
    if tool_format is not None:
        allowed = "calls" if conversation.forces_tool_call else "calls_or_answer" if _is_format(grammar) else "any"
        grammar = _grammar_with_tools(grammar, tool_format, conversation, codec)
    markers = format.reasoning if grammar is None and not conversation.continues_last_message else None
    literals = [*(markers or ()), *([] if tool_format is None else tool_format.literals)]
    special = frozenset(token for text, token in codec.special_tokens.items() if any(text in each for each in literals))
    prompt_end = codec.token_text(prompt[-MAX_PROMPT_END_TOKENS:]).rstrip()
    tools = {name: tool["function"].get("parameters") for name, tool in _by_name(conversation).items()}
    parser = MarkupParser(
        None if markers is None else ReasoningParser(prompt_end.endswith(markers[0]), markers),
        None if tool_format is None else ToolCallParser(tool_format, tools, allowed, keep_cut_call),
    )
    return ConversationOutput(parser, grammar, special, has_calls=tool_format is not None)


def _by_name(conversation: Conversation) -> dict[str, dict[str, Any]]:
    return {tool["function"]["name"]: tool for tool in conversation.tools}


def _harmony_output(
    codec: TextCodec,
    conversation: Conversation,
    prompt: Sequence[int],
    grammar: GrammarRequest | None,
    keep_cut_call: bool,
    markers: Mapping[int, str],
) -> ConversationOutput:
    """As `conversation_output`, for harmony: the output can have analysis before whatever a grammar constrains."""
    prompt_end = HarmonyCodec(codec, markers).prompt_end(prompt)
    has_tools = bool(conversation.tools) and conversation.tool_choice != "none"
    forced = conversation.forces_tool_call
    names = [tool["function"]["name"] for tool in conversation.tools] if has_tools else None
    parser = HarmonyParser(prompt_end, names, drops_cut_call=forced, keep_cut_call=keep_cut_call)
    if grammar is not None or forced:
        _check_tool_choice(grammar, forced)
        grammar = _harmony_grammar(conversation, prompt_end, grammar, markers)
    return ConversationOutput(parser, grammar, harmony=markers, has_calls=has_tools)


def _harmony_grammar(
    conversation: Conversation, prompt_end: str, grammar: GrammarRequest | None, markers: Mapping[int, str]
) -> GrammarRequest:
    """Returns the grammar of the messages: that of a call if a tool must be called, and otherwise with `grammar` in the
    channel final. If the output continues a message, that is its rest."""
    state, forced = ChannelParser(prompt_end).state, conversation.forces_tool_call
    if state == "body" and grammar is not None and not forced:
        return grammar
    if state == "body":
        raise ApiError(400, "tool_choice: a call cannot continue the last message; omit one of them", "tool_choice")
    calls = forced or (_is_format(grammar) and conversation.tool_choice != "none")
    tools = _callable_tools(conversation) if calls else {}
    answer = None if forced or grammar is None else grammar
    lark = harmony_grammar(markers, state, tools, answer is not None)
    param = "tool_choice" if answer is None else answer[2]
    if answer is None:
        return "lark", lark, param
    return "nested", json.dumps({"lark": lark, "kind": answer[0], "text": answer[1]}), param


def _callable_tools(conversation: Conversation) -> dict[str, dict[str, object]]:
    """Returns the schemas of the arguments by name of the tools that can be called: of the one that `tool_choice`
    names, or of all."""
    tools = {name: _argument_schema(tool["function"]) for name, tool in _by_name(conversation).items()}
    if conversation.forces_tool_call and conversation.tool_choice in tools:
        return {conversation.tool_choice: tools[conversation.tool_choice]}
    return tools


def _argument_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, of which only `strict` has every keyword enforced."""
    schema = function.get("parameters") or {}
    return schema if function.get("strict") else lenient(schema)


def _tool_format(conversation: Conversation, format: TemplateFormat) -> ToolCallFormat | None:
    if not conversation.tools or conversation.tool_choice == "none":
        return None
    if format.tool_calls is None:
        raise unsupported("tools", f"this model's tool calls cannot be read: {format.reason}")
    return format.tool_calls


def _is_format(grammar: GrammarRequest | None) -> bool:
    return grammar is not None and grammar[2] in ANSWER_FORMATS


def _check_tool_choice(grammar: GrammarRequest | None, forced: bool) -> None:
    """Raises ApiError if a constraint of the whole output excludes the call that is required."""
    if forced and grammar is not None and not _is_format(grammar):
        raise ApiError(400, f"{grammar[2]} and tool_choice both constrain the answer; omit one of them", "tool_choice")


def _grammar_with_tools(
    grammar: GrammarRequest | None, tool_format: ToolCallFormat, conversation: Conversation, codec: TextCodec
) -> GrammarRequest | None:
    """Returns the grammar of an output that can call tools.

    If a tool must be called, the grammar accepts exactly one call: of any tool, or of the one that `tool_choice` names.
    Otherwise the format of the answer (`ANSWER_FORMATS`) restricts only an answer without calls, and any other
    constraint the whole output. Raises ApiError if such a constraint excludes the call.
    """
    forced = conversation.forces_tool_call
    if not forced and not _is_format(grammar):
        return grammar
    _check_tool_choice(grammar, forced)
    tools = _callable_tools(conversation)
    if forced or grammar is None:
        return "lark", tool_call_grammar(tool_format, tools, codec.special_tokens), "tool_choice"
    answer, single = json.loads(grammar[1]), conversation.single_tool_call
    return "lark", tool_call_grammar(tool_format, tools, codec.special_tokens, answer, single), grammar[2]
