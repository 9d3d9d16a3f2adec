"""Request fields that are accepted and ignored, for each object of a request.

They cannot change an answer of this service: cache hints, telemetry, storage and billing, hints about reasoning and
verbosity for models that have no such control, and text that clients keep with the history for themselves. The
response header `X-Polylora-Ignored` names those that a request contained. `None` accepts any value; a tuple lists the
values that mean the same as leaving the field out, and any other value is rejected. The names come from the request
types of OpenAI's and Anthropic's Python clients and from requests of Claude Code, Codex, Cline, Continue, Open WebUI,
LiteLLM, LangChain, LlamaIndex, lm-eval, lighteval, guidellm, inspect_ai and vLLM's benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Ignored = Mapping[str, tuple[Any, ...] | None]


def _any(names: str) -> Ignored:
    return dict.fromkeys(names.split())


#: Hints about how much a model should think; models of this service think if their chat template says so.
_REASONING = _any("include_reasoning reasoning reasoning_effort reasoning_format separate_reasoning thinking verbosity")

#: Of every request that generates.
REQUEST: Ignored = {
    **_any("""
        metadata store safety_identifier service_tier prompt_cache_key prompt_cache_options prompt_cache_retention
        cache_prompt cache_salt caching client_metadata litellm_metadata litellm_call_id request_id rid session_id trace
        timeout
    """),
    **_REASONING,
    # vLLM, SGLang
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    # OpenAI
    "background": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    # llama.cpp and text-generation-inference
    "decoder_input_details": (False,),
    "details": (False,),
    "dry_multiplier": (0, 0.0),
    "mirostat": (0,),
    "n_probs": (0,),
    "num_beams": (1,),
    "repeat_penalty": (1, 1.0),
    "return_full_text": (False,),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
    "watermark": (False,),
    "xtc_probability": (0, 0.0),
}

#: Reasons for rejecting some of them at other values.
REASONS: Mapping[str, str] = {
    "chat_template_kwargs": "use it with /v1/chat/completions or /tokenize",
    "suffix": "these models were not trained to fill in the middle",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "tools": "use /v1/chat/completions, /v1/responses or /v1/messages",
    "background": "use /v1/batches",
    "enable_thinking": "use chat_template_kwargs",
    "web_search_options": "this service has no hosted tools",
    "repeat_penalty": "use repetition_penalty",
}

EMBEDDINGS_REQUEST: Ignored = {
    **_any("client_metadata litellm_metadata metadata request_id timeout"),
    "add_special_tokens": (True,),
    "normalize": (True,),
    "priority": (0,),
    "truncate_prompt_tokens": (-1,),
}
#: vLLM's, Jina's and Cohere's, for scores of texts.
SCORING_REQUEST: Ignored = {
    **EMBEDDINGS_REQUEST,
    "max_tokens_per_doc": (0,),
    "max_tokens_per_query": (0,),
    "padding": ("do_not_pad",),
}
TOKENIZE_REQUEST: Ignored = {"add_special_tokens": (True,)}
CHAT_REQUEST: Ignored = {**REQUEST, "add_special_tokens": (False,)}
STREAM_OPTIONS = _any("include_obfuscation")
#: Of a text part, in any API.
PART = _any("annotations cache_control citations id index logprobs prompt_cache_breakpoint")

#: Of a chat message. `id`, `opts`, `type` and others are notes that clients keep with their history.
MESSAGE: Ignored = {
    **_any("""
        annotations cache_control created_at cycle id metadata opts parsed phase provider_specific_fields reasoning
        reasoning_content reasoning_details reasoning_signature status thinking thinking_blocks thinking_signature
        timestamp usage
    """),
    "type": ("text", "message"),
    "prefix": (False,),
}
FUNCTION_CALL = _any("parsed_arguments provider_specific_fields thought_signature")
TOOL_CALL = _any("cache_control extra_content index provider_specific_fields status")
TOOL: Ignored = {
    **_any("""
        allowed_callers cache_control defer_loading eager_input_streaming input_examples output_schema returns
    """),
    "async": (False,),
}
JSON_SCHEMA = _any("description")

#: Anthropic's Messages API.
MESSAGES_REQUEST: Ignored = {
    **_any("""
        anthropic_beta anthropic_version betas billing_policy cache_control context_management diagnostics
        fallback_credit_token inference_geo metadata service_tier speed thinking user_profile_id workspace_id
    """),
}
OUTPUT_CONFIG = _any("effort")
TOOL_USE = _any("cache_control caller")
TOOL_RESULT = _any("cache_control")
#: Reasoning blocks and items of earlier answers: they are left out of the prompt.
REASONING_ITEM = _any("cache_control content data encrypted_content id signature status summary thinking")

#: OpenAI's Responses API.
RESPONSES_REQUEST: Ignored = {
    **_any("""
        access_programs client_metadata context_management image max_tool_calls prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning safety_identifier service_tier stream_options
    """),
    "background": (False,),
    "top_logprobs": (0,),
}
TEXT_FIELD = _any("verbosity")
ITEM = _any("async caller id internal_chat_message_metadata_passthrough metadata namespace phase status")
