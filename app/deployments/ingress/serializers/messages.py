"""Anthropic's Messages API: response bodies and stream events, made from content blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import ErrorReply
from app.deployments.ingress.preprocess.tools import arguments_object
from app.deployments.ingress.serializers.content_blocks import Block, BlockEvent, BlocksDone, answer_id, block_events
from app.engine.request import Usage

MESSAGES_PATH = "/v1/messages"
#: Anthropic's error types by status.
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


def is_messages(path: str) -> bool:
    """Whether a route is one of Anthropic's."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_body_for(answer: ErrorReply, path: str) -> dict[str, Any]:
    """An error in the format of the route's API."""
    return messages_error_body(answer) if is_messages(path) else answer.body


def messages_error_body(answer: ErrorReply) -> dict[str, Any]:
    """An error in Anthropic's format."""
    kind = _ERRORS.get(answer.status, "invalid_request_error" if answer.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": answer.body["error"]["message"]}}


def error_event(answer: ErrorReply) -> bytes:
    """An error as a stream event."""
    return named_event("error", {"error": messages_error_body(answer)["error"]})


def message_body(task: GenerationTask, model: str, blocks: Sequence[Block], end: BlocksDone) -> dict[str, Any]:
    """A complete answer."""
    content = [_block(block) | ({"text": block.text} if block.kind == "text" else _input(block)) for block in blocks]
    return _message(task, model) | {
        "content": content,
        "stop_reason": _stop_reason(end, any(block.kind == "call" for block in blocks)),
        "stop_sequence": end.stop,
        "usage": _usage(end.usage),
    }


async def message_events(task: GenerationTask, model: str) -> AsyncGenerator[bytes]:
    """The events of a streamed answer."""
    is_started = has_calls = False
    async with aclosing(block_events(task)) as source:
        async for change in source:
            prefix = b"" if is_started else named_event("message_start", {"message": _message_start(task, model)})
            is_started = True
            if isinstance(change, BlocksDone):
                delta = {"stop_reason": _stop_reason(change, has_calls), "stop_sequence": change.stop}
                ended = named_event("message_delta", {"delta": delta, "usage": _usage(change.usage)})
                yield prefix + ended + named_event("message_stop", {})
            else:
                has_calls = has_calls or change.block.kind == "call"
                yield prefix + _event(change)


def _event(change: BlockEvent) -> bytes:
    block, index = change.block, {"index": change.block.index}
    if change.what == "open":
        empty: dict[str, Any] = {"text": ""} if block.kind == "text" else {"input": {}}
        return named_event("content_block_start", index | {"content_block": _block(block) | empty})
    if change.what == "close":
        return named_event("content_block_stop", index)
    if block.kind == "text":
        return named_event("content_block_delta", index | {"delta": {"type": "text_delta", "text": change.piece}})
    delta = {"type": "input_json_delta", "partial_json": change.piece}
    return named_event("content_block_delta", index | {"delta": delta})


def _message_start(task: GenerationTask, model: str) -> dict[str, Any]:
    return _message(task, model) | {"content": [], "stop_reason": None, "usage": _usage(task.usages[0])}


def _message(task: GenerationTask, model: str) -> dict[str, Any]:
    fields = {"type": "message", "role": "assistant", "model": model, "stop_sequence": None}
    return {"id": answer_id(task, "msg"), **fields}


def _block(block: Block) -> dict[str, Any]:
    return {"type": "text"} if block.kind == "text" else {"type": "tool_use", "id": block.id, "name": block.name}


def _input(block: Block) -> dict[str, Any]:
    return {"input": arguments_object(block.text)}


def _stop_reason(end: BlocksDone, has_calls: bool) -> str:
    if end.stop is not None:
        return "stop_sequence"
    if end.reason == "length":
        return "max_tokens"
    return "tool_use" if has_calls else "end_turn"


def _usage(usage: Usage | None) -> dict[str, int]:
    """Anthropic's `input_tokens` does not include cached tokens."""
    usage = usage or Usage(0, 0, 0)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
