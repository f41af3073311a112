"""Request fields of OpenAI, Anthropic, vLLM, llama.cpp and SGLang that are refused.

An endpoint serves the fields that its request class declares. Of the others, those in REFUSED return an error unless
their value changes nothing, and the rest is ignored: it has no effect on the output that a client could miss. A name
with a dot is a field of an object, such as `stream_options`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftspec.params import FILTERS
from swiftspec.serve.errors import unsupported
from swiftspec.serve.schema import ExtensibleBody


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused: `advice` states what to use instead. `harmless`: values that change nothing and are
    accepted; null always is."""

    advice: str = "omit it"
    harmless: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Returns whether a value changes nothing."""
        return value is None or any(type(value) is type(each) and value == each for each in self.harmless)


STRUCTURED = "use structured_outputs or response_format, in /v1/messages output_config.format"
CHAT_ONLY = "use /v1/chat/completions"
COMPLETIONS = "use /v1/chat/completions or /v1/completions"
STOP = "use stop in /v1/chat/completions and /v1/completions, stop_sequences in /v1/messages"
ONE_MODEL = "the model is chosen when the server starts"
SESSIONS = "use previous_response_id in /v1/responses, or send the whole conversation"
NO_MEDIA = "this model reads and writes text only"
NO_SAMPLER = f"use temperature, {', '.join(FILTERS[:-1])} or {FILTERS[-1]}"

REFUSED: Mapping[str, Refusal] = {
    # prompts, messages and limits under the name of another endpoint
    "messages": Refusal("use prompt in /v1/completions, input in /v1/responses"),
    "prompt_embeds": Refusal("use prompt"),
    "prompt": Refusal("use messages in /v1/chat/completions and /v1/messages, input in /v1/responses"),
    "input": Refusal("use messages, in /v1/completions prompt"),
    "instructions": Refusal("use a system message"),
    "system": Refusal("use a system message, in /v1/responses instructions"),
    "suffix": Refusal("use /v1/completions", ("",)),
    "echo": Refusal(COMPLETIONS, (False,)),
    "max_tokens": Refusal("use max_output_tokens"),
    "max_completion_tokens": Refusal("use max_tokens, in /v1/responses max_output_tokens"),
    "max_output_tokens": Refusal("use max_tokens"),
    "n_predict": Refusal("use max_tokens", (-1,)),
    "min_new_tokens": Refusal("use min_tokens", (0,)),
    "stop": Refusal(STOP, ([], "")),
    "stop_sequences": Refusal(STOP, ([],)),
    "stop_regex": Refusal(STOP, ([], "")),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "n": Refusal(COMPLETIONS, (1,)),
    "best_of": Refusal("use /v1/completions", (0, 1)),
    "use_beam_search": Refusal(NO_SAMPLER, (False,)),
    "truncation": Refusal("use truncate_prompt_tokens", ("disabled",)),
    "n_keep": Refusal("use truncate_prompt_tokens", (0,)),
    "add_special_tokens": Refusal("the chat template adds special tokens", (False,)),
    "t_max_predict_ms": Refusal("close the connection to end an output", (0, -1)),
    # log-probabilities, token ids and other parts of the response
    "logprobs": Refusal("use top_logprobs; /v1/messages has no log-probabilities", (False,)),
    "top_logprobs": Refusal("use logprobs in /v1/completions; /v1/messages has no log-probabilities", (0,)),
    "prompt_logprobs": Refusal(COMPLETIONS),
    "logprob_token_ids": Refusal(COMPLETIONS),
    "return_token_ids": Refusal(COMPLETIONS, (False,)),
    "return_tokens_as_token_ids": Refusal(COMPLETIONS, (False,)),
    "return_prompt_text": Refusal("use echo in /v1/completions", (False,)),
    "return_tokens": Refusal("use return_token_ids", (False,)),
    "n_probs": Refusal("use logprobs", (0,)),
    "post_sampling_probs": Refusal("use logprobs", (False,)),
    "timings_per_token": Refusal("the last chunk contains timings", (False,)),
    "return_progress": Refusal(harmless=(False,)),
    "response_fields": Refusal(harmless=([],)),
    "return_hidden_states": Refusal(harmless=(False,)),
    "return_routed_experts": Refusal(harmless=(False,)),
    "return_cached_tokens_details": Refusal("usage contains cached_tokens", (False,)),
    "return_meta_info": Refusal("metrics contains the statistics", (False,)),
    # sampling
    "typical_p": Refusal(NO_SAMPLER, (1, 1.0)),
    "tfs_z": Refusal(NO_SAMPLER, (1, 1.0)),
    "top_a": Refusal(NO_SAMPLER, (0, 0.0)),
    "top_n_sigma": Refusal(NO_SAMPLER, (0, 0.0, -1, -1.0)),
    "mirostat": Refusal(NO_SAMPLER, (0,)),
    "dynatemp_range": Refusal(NO_SAMPLER, (0, 0.0)),
    "xtc_probability": Refusal(NO_SAMPLER, (0, 0.0)),
    "adaptive_target": Refusal(NO_SAMPLER, (-1, -1.0)),
    "samplers": Refusal("the order is that of vLLM"),
    "repeat_penalty": Refusal("use repetition_penalty", (1, 1.0)),
    "dry_multiplier": Refusal("use repetition_penalty or frequency_penalty", (0, 0.0)),
    "repetition_detection": Refusal("use repetition_penalty or frequency_penalty"),
    "sampling_seed": Refusal("use seed"),
    "sampling_params": Refusal("give its fields in the body", ({},)),
    "logits_processors": Refusal("use logit_bias, allowed_token_ids or bad_words", ([],)),
    "custom_logit_processor": Refusal("use logit_bias, allowed_token_ids or bad_words"),
    "custom_params": Refusal(harmless=({},)),
    "vllm_xargs": Refusal(harmless=({},)),
    "watermarking": Refusal(harmless=(False,)),
    "backend_sampling": Refusal(harmless=(False,)),
    # constraints
    "response_format": Refusal("use output_config.format", ({"type": "text"},)),
    "text": Refusal("use response_format, in /v1/messages output_config.format", ({"format": {"type": "text"}}, {})),
    "output_config": Refusal("use response_format and reasoning_effort, in /v1/responses text.format and reasoning"),
    "output_format": Refusal("use output_config.format, elsewhere response_format"),
    "structured_outputs": Refusal(STRUCTURED),
    "guided_json": Refusal(STRUCTURED),
    "guided_regex": Refusal(STRUCTURED),
    "guided_choice": Refusal(STRUCTURED),
    "guided_grammar": Refusal(STRUCTURED),
    "guided_whitespace_pattern": Refusal(STRUCTURED),
    "grammar": Refusal(STRUCTURED, ("",)),
    "json_schema": Refusal(STRUCTURED),
    "regex": Refusal(STRUCTURED),
    "ebnf": Refusal(STRUCTURED),
    "structural_tag": Refusal(STRUCTURED),
    "grammar_lazy": Refusal("use tools", (False,)),
    "grammar_triggers": Refusal("use tools", ([],)),
    # conversations, tools and reasoning
    "chat_template": Refusal("use chat_template_kwargs"),
    "chat_template_kwargs": Refusal(CHAT_ONLY, ({},)),
    "add_generation_prompt": Refusal(CHAT_ONLY, (True,)),
    "continue_final_message": Refusal("end with an assistant message in /v1/messages, or " + CHAT_ONLY, (False,)),
    "documents": Refusal("put them into a message", ([],)),
    "tools": Refusal(CHAT_ONLY, ([],)),
    "tool_choice": Refusal(CHAT_ONLY, ("none", "auto")),
    "parallel_tool_calls": Refusal("use tool_choice.disable_parallel_tool_use in /v1/messages", (True,)),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tool_choice", ("none", "auto")),
    "web_search_options": Refusal("use tools of type function"),
    "mcp_servers": Refusal("use tools", ([],)),
    "container": Refusal("use tools"),
    "reasoning_effort": Refusal("use reasoning.effort in /v1/responses, output_config.effort in /v1/messages"),
    "thinking_token_budget": Refusal("use max_tokens, or reasoning_effort if the chat template reads it", (-1,)),
    "thinking_budget_tokens": Refusal("use max_tokens, or reasoning_effort if the chat template reads it", (-1,)),
    "reasoning_budget": Refusal("use max_tokens, or reasoning_effort if the chat template reads it", (-1,)),
    "thinking_forced_open": Refusal("the chat template determines it", (False,)),
    "include_reasoning": Refusal(CHAT_ONLY, (True,)),
    "separate_reasoning": Refusal("read reasoning_content", (True,)),
    "stream_reasoning": Refusal("use include_reasoning in /v1/chat/completions", (True,)),
    "reasoning_format": Refusal("read reasoning_content", ("auto", "deepseek")),
    "previous_response_id": Refusal(SESSIONS),
    "conversation": Refusal(SESSIONS),
    "session_params": Refusal(SESSIONS),
    "background": Refusal("use stream", (False,)),
    "include": Refusal("use logprobs and top_logprobs", ([],)),
    # media
    "audio": Refusal(NO_MEDIA),
    "modalities": Refusal(NO_MEDIA, (["text"], [])),
    "image_data": Refusal(NO_MEDIA, ([],)),
    "multimodal_data": Refusal(NO_MEDIA, ([],)),
    # infilling of llama.cpp
    "input_prefix": Refusal("use prompt and suffix of /v1/completions", ("",)),
    "input_suffix": Refusal("use prompt and suffix of /v1/completions", ("",)),
    "input_extra": Refusal("use prompt and suffix of /v1/completions", ([],)),
    "n_indent": Refusal(harmless=(0,)),
    # serving
    "priority": Refusal("requests are served in the order of their arrival", (0,)),
    "cache_salt": Refusal("the prefix cache is shared; disable it with --prefix-cache-memory 0"),
    "extra_key": Refusal("the prefix cache is shared; disable it with --prefix-cache-memory 0"),
    "kv_transfer_params": Refusal(harmless=({},)),
    "ec_transfer_params": Refusal(harmless=({},)),
    "bootstrap_host": Refusal(),
    "bootstrap_port": Refusal(),
    "bootstrap_room": Refusal(),
    "lora": Refusal(ONE_MODEL, ([],)),
    "lora_path": Refusal(ONE_MODEL),
    "models": Refusal(ONE_MODEL, ([],)),
}


def reject_unsupported(body: ExtensibleBody, also: Collection[str] = (), ignored: Collection[str] = ()) -> None:
    """Raises ApiError if a field that the endpoint does not serve has a value that asks for something.

    `also`: fields that the class of `body` declares although the endpoint does not serve them.
    `ignored`: fields that have no effect on this endpoint, such as those of a request whose tokens it counts.
    """
    declared = ((name, getattr(body, name)) for name in also)
    for name, value in (*declared, *_undeclared(body)):
        refusal = None if name in ignored else REFUSED.get(name)
        if refusal is not None and not refusal.accepts(value):
            only = ", ".join(map(json.dumps, refusal.harmless))
            raise unsupported(name, f"not supported{f' (except {only})' if only else ''}; {refusal.advice}")


def _undeclared(body: ExtensibleBody, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields name and value of each field that the class of `body`, or of an object in it, does not declare."""
    for name, value in (body.model_extra or {}).items():
        yield prefix + name, value
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, ExtensibleBody):
            yield from _undeclared(value, f"{prefix}{name}.")
