"""What answers look like: JSON schemas of those that clients are generated for.

In: nothing. Out: `ANSWERS`, schemas by name, as `/openapi.json` has them. Rule: what is required is always there, and
what is said of a field is true of every answer; an answer may have more fields than its schema. The tests hold all
their answers to these. Where no schema is named an answer is described as an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

Schema = Mapping[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_TIME: Schema = {"type": "integer", "description": "Unix time in whole seconds."}
_NONE: Mapping[str, Schema] = MappingProxyType({})


def named(name: str) -> Schema:
    """A schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _record(required: Mapping[str, Schema], optional: Mapping[str, Schema] = _NONE) -> Schema:
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _one_of(values: Sequence[str]) -> Schema:
    return {"type": "string", "enum": [*values]}


def _page(item: str) -> Schema:
    ends = {name: {"type": ["string", "integer", "null"]} for name in ("first_id", "last_id")}
    return _record({"object": _const("list"), "data": _list(named(item)), **ends, "has_more": _BOOLEAN})


_USAGE = _record(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": _record({"cached_tokens": _INTEGER}),
    },
    {
        "completion_tokens_details": _record(
            {"accepted_prediction_tokens": _INTEGER, "rejected_prediction_tokens": _INTEGER}
        )
    },
)
_TOOL_CALL = _record(
    {"id": _STRING, "type": _const("function"), "function": _record({"name": _STRING, "arguments": _STRING})}
)
_CHOICE = {"index": _INTEGER, "finish_reason": _STRING, "logprobs": _or_null(_OBJECT)}
_CHAT_MESSAGE = _record(
    {"role": _const("assistant"), "content": _or_null(_STRING), "refusal": {"type": "null"}},
    {"tool_calls": _list(named("ToolCall"))},
)
_ENVELOPE = {"id": _STRING, "created": _TIME, "model": _STRING, "usage": named("Usage")}
_CHAT_COMPLETION = _record(
    {
        "object": _const("chat.completion"),
        **_ENVELOPE,
        "choices": _list(_record({**_CHOICE, "message": _CHAT_MESSAGE})),
    },
    {"routing": _OBJECT},
)
_COMPLETION = _record(
    {
        "object": _const("text_completion"),
        **_ENVELOPE,
        "choices": _list(
            _record({**_CHOICE, "text": _STRING}, {"token_ids": _list(_INTEGER), "prompt_token_ids": _list(_INTEGER)})
        ),
    },
    {"routing": _OBJECT, "adapter": _or_null(_record({"name": _STRING, "generation": _INTEGER, "digest": _STRING}))},
)
_EMBEDDING = _record(
    {
        "object": _const("embedding"),
        "index": _INTEGER,
        "embedding": {"anyOf": [_list(_NUMBER), {"type": "string", "description": "base64 of little-endian float32."}]},
    }
)
_EMBEDDINGS = _record(
    {
        "object": _const("list"),
        "data": _list(_EMBEDDING),
        "model": _STRING,
        "usage": _record({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
    }
)
_MODEL = _record(
    {
        "id": _STRING,
        "object": _const("model"),
        "created": _TIME,
        "owned_by": _STRING,
        "root": _STRING,
        "parent": _or_null(_STRING),
    },
    {"max_model_len": _INTEGER, "alora_invocation_tokens": _list(_INTEGER)},
)
_RESPONSE = _record(
    {
        "id": _STRING,
        "object": _const("response"),
        "created_at": _TIME,
        "status": _one_of(("in_progress", "incomplete", "completed")),
        "error": {"type": "null"},
        "incomplete_details": _or_null(_record({"reason": _STRING})),
        "model": _STRING,
        "instructions": _or_null(_STRING),
        "max_output_tokens": _or_null(_INTEGER),
        "temperature": _NUMBER,
        "top_p": _NUMBER,
        "parallel_tool_calls": _BOOLEAN,
        "tools": _list(_OBJECT),
        "output": _list(
            _record(
                {"type": _one_of(("message", "function_call")), "id": _STRING, "status": _STRING},
                {"role": _const("assistant"), "content": _list(_OBJECT)}
                | {"call_id": _STRING, "name": _STRING, "arguments": _STRING},
            )
        ),
        "previous_response_id": _or_null(_STRING),
        "store": _BOOLEAN,
        "text": _OBJECT,
        "metadata": _OBJECT,
        "usage": _or_null(_record({"input_tokens": _INTEGER, "output_tokens": _INTEGER, "total_tokens": _INTEGER})),
    }
)
_JOB = _record(
    {
        "id": _STRING,
        "object": _const("lora.job"),
        "name": _STRING,
        "kind": _one_of(("load", "unload")),
        "path": _STRING,
        "state": _STRING,
        "reason": _or_null(_STRING),
        "generation": _or_null(_INTEGER),
        "digest": _or_null(_STRING),
        "requested_by": _STRING,
        "created": _TIME,
        "updated": _TIME,
    }
)
_LORA_NAME = {"id": _STRING, "object": _const("lora")}
#: What a registered adapter is.
_LORA_FACTS = {
    "state": _STRING,
    "generation": _INTEGER,
    "digest": _STRING,
    "path": _STRING,
    "source": _STRING,
    "max_rank": _INTEGER,
    "size_bytes": _INTEGER,
    "created": _TIME,
    "owner": _STRING,
    "pinned": _BOOLEAN,
    "traffic_weight": _NUMBER,
    "description": _STRING,
    "metadata": _OBJECT,
    "alora_invocation_tokens": _or_null(_list(_INTEGER)),
}
_RESIDENCY = _record(
    {
        "host": _BOOLEAN,
        "replicas": _list(_record({"id": _STRING, "num_requests": _INTEGER, "last_used": _or_null(_TIME)})),
    }
)
#: What becomes of a name, whether it is registered or only on its way.
_LORA_STATE = _record(
    {**_LORA_NAME, "state": _STRING, "job": _or_null(named("LoraJob"))},
    {
        **_LORA_FACTS,
        "reason": _or_null(_STRING),
        "last_error": _or_null(_STRING),
        "last_used": _or_null(_TIME),
        "residency": _RESIDENCY,
        "activity": _record({"since": _TIME, "requests": _INTEGER, "errors": _INTEGER}),
    },
)
_GENERATION = _record(
    {
        "id": _INTEGER,
        "digest": _STRING,
        "path": _STRING,
        "max_rank": _INTEGER,
        "size_bytes": _INTEGER,
        "created": _TIME,
        "registered_by": _STRING,
    }
)

#: By the names that routes give (`openapi.takes`).
ANSWERS: Mapping[str, Schema] = {
    "Usage": _USAGE,
    "ToolCall": _TOOL_CALL,
    "ChatCompletion": _CHAT_COMPLETION,
    "Completion": _COMPLETION,
    "Embeddings": _EMBEDDINGS,
    "Model": _MODEL,
    "ModelList": _page("Model"),
    "Response": _RESPONSE,
    "Lora": _record({**_LORA_NAME, **_LORA_FACTS}, {"job": _or_null(named("LoraJob"))}),
    "LoraList": _page("Lora"),
    "LoraState": _LORA_STATE,
    "LoraGeneration": _GENERATION,
    "LoraGenerationList": _page("LoraGeneration"),
    "LoraJob": _JOB,
    "Results": {"anyOf": [named("Result"), _list(named("Result"))]},
    "Result": _record({"text": _STRING, "meta_info": _OBJECT}),
}
