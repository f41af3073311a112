"""The table of known fields: every field of OpenAI, Anthropic, vLLM, llama.cpp and SGLang is declared, refused or
ignored on purpose, in all endpoints."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import pytest

from swiftspec.serve.anthropic.messages import MessagesRequest
from swiftspec.serve.errors import ApiError
from swiftspec.serve.known_fields import REFUSED, reject_unsupported
from swiftspec.serve.openai.chat import ChatRequest
from swiftspec.serve.openai.completions import CompletionRequest
from swiftspec.serve.openai.responses import ResponsesRequest
from swiftspec.serve.schema import ExtensibleBody
from tests.serve.test_app import CHAT, HELLO, MESSAGES, RESPONSES, TEXT, refused
from tests.support.http import Player

ENDPOINTS: dict[str, tuple[type[ExtensibleBody], dict[str, Any]]] = {
    CHAT: (ChatRequest, HELLO),
    TEXT: (CompletionRequest, {"prompt": "a"}),
    RESPONSES: (ResponsesRequest, {"input": "a"}),
    MESSAGES: (MessagesRequest, {**HELLO, "max_tokens": 5}),
}
COMMON = "model stream temperature top_p"
OPENAI_CHAT = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata
modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort
response_format safety_identifier seed service_tier stop store stream_options tool_choice tools top_logprobs user
verbosity web_search_options
"""
OPENAI_TEXT = """
best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty prompt seed stop stream_options suffix
user
"""
OPENAI_RESPONSES = """
background context_management conversation include input instructions max_output_tokens max_tool_calls metadata
parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning safety_identifier
service_tier store stream_options text tool_choice tools top_logprobs truncation user
"""
ANTHROPIC = """
cache_control container context_management inference_geo max_tokens mcp_servers messages metadata output_config
output_format service_tier stop_sequences system thinking tool_choice tools top_k
"""
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents ec_transfer_params echo ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logits_processors logprob_token_ids media_io_kwargs min_p min_tokens
mm_processor_kwargs priority prompt_logprobs repetition_detection repetition_penalty request_id return_prompt_text
return_token_ids return_tokens_as_token_ids session_id skip_special_tokens spaces_between_special_tokens stop_token_ids
structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
watermarking guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend
"""
LLAMA_CPP = """
cache_prompt chat_format dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
dynatemp_exponent dynatemp_range grammar grammar_lazy grammar_triggers id_slot input_extra input_prefix input_suffix
json_schema lora min_keep min_p mirostat mirostat_eta mirostat_tau n_discard n_indent n_keep n_predict n_probs
parse_tool_calls post_sampling_probs reasoning_format repeat_last_n repeat_penalty response_fields return_progress
return_tokens samplers t_max_predict_ms thinking_forced_open timings_per_token top_n_sigma typical_p xtc_probability
xtc_threshold
"""
SGLANG = """
bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params data_parallel_rank ebnf extra_key
lora_path min_new_tokens no_stop_trim regex return_cached_tokens_details return_hidden_states return_meta_info
return_routed_experts rid sampling_seed separate_reasoning session_params stop_regex stream_reasoning
"""
NESTED = """
stream_options.include_usage stream_options.include_obfuscation stream_options.continuous_usage_stats
structured_outputs.json structured_outputs.regex structured_outputs.choice structured_outputs.grammar
structured_outputs.json_object structured_outputs.structural_tag structured_outputs.disable_any_whitespace
structured_outputs.disable_additional_properties structured_outputs.disable_fallback
structured_outputs.whitespace_pattern
"""
WITHOUT_EFFECT = """
metadata prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier
store stream_options stream_options.include_obfuscation user verbosity max_tool_calls reasoning thinking
cache_control context_management inference_geo guided_decoding_backend length_penalty media_io_kwargs
mm_processor_kwargs request_id session_id spaces_between_special_tokens structured_outputs.disable_fallback
cache_prompt chat_format dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
id_slot min_keep mirostat_eta mirostat_tau n_cache_reuse n_discard parse_tool_calls repeat_last_n xtc_threshold
data_parallel_rank rid routed_dp_rank
"""
IGNORED = {*WITHOUT_EFFECT.split()}  # identifiers, hints, and parameters of features that are refused if switched on
PEERS = " ".join((COMMON, OPENAI_CHAT, OPENAI_TEXT, OPENAI_RESPONSES, ANTHROPIC, VLLM, LLAMA_CPP, SGLANG)).split()


def declares(kind: type[ExtensibleBody], name: str) -> bool:
    return any(name in (field, info.alias) for field, info in kind.model_fields.items())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_known_field_is_served_refused_or_ignored(path: str) -> None:
    kind, minimal = ENDPOINTS[path]
    for name in sorted({*PEERS, *IGNORED, *REFUSED}):
        if "." in name or declares(kind, name):
            continue
        assert (name in IGNORED) + (name in REFUSED) == 1, f"{name}: add it to REFUSED, or here to IGNORED"
        accepted = [None, "odd"] if name in IGNORED else [None, *REFUSED[name].harmless]
        for value in accepted:
            reject_unsupported(kind.model_validate({**minimal, name: value}))
        if name in REFUSED:
            with pytest.raises(ApiError, match=f"^{name}: not supported.*; {REFUSED[name].advice[:9]}") as error:
                reject_unsupported(kind.model_validate({**minimal, name: "odd"}))
            assert error.value.param == name and error.value.status == 400


def test_fields_of_objects() -> None:
    for name in NESTED.split():
        outer, inner = name.split(".")
        (kind, _) = get_args(ChatRequest.model_fields[outer].annotation)
        assert declares(kind, inner) + (name in IGNORED) + (name in REFUSED) == 1, name
        if name in REFUSED:
            for value in (True, False):
                body = ChatRequest.model_validate({**HELLO, outer: {"json": {}, inner: value}})
                if REFUSED[name].accepts(value):
                    reject_unsupported(body)
                else:
                    with pytest.raises(ApiError, match=f"^{name}: not supported"):
                        reject_unsupported(body)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_endpoints_consult_the_table(player: Player, client: httpx.Client, path: str) -> None:
    body = {**ENDPOINTS[path][1], "verbosity": "low", "made_up": 1, "mirostat": 0, "xtc_probability": 0}
    assert client.post(path, json=body).status_code == 200
    message = refused(client, path, {**body, "mirostat": 2}, "mirostat")
    assert message == "mirostat: not supported (except 0); use temperature, top_p, top_k or min_p"
    assert refused(client, path, {**body, "cache_salt": "x"}, "cache_salt").endswith("--prefix-cache-memory 0")


def test_messages_consult_the_table(player: Player, client: httpx.Client) -> None:
    body = ENDPOINTS[MESSAGES][1]
    for name in ("n", "best_of"):
        error = client.post(MESSAGES, json={**body, name: 2}).json()["error"]
        assert error["message"].startswith(f"{name}: not supported (except ")
    assert client.post(MESSAGES, json={**body, "n": 1, "best_of": 1, "metadata": {"user_id": "u"}}).status_code == 200
