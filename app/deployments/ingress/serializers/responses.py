"""OpenAI's Responses API: response bodies and stream events, made from content blocks."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import ErrorReply
from app.deployments.ingress.schemas.responses import ResponsesRequest
from app.deployments.ingress.serializers.content_blocks import Block, BlockEvent, BlocksDone, answer_id, block_events
from app.deployments.ingress.serializers.messages import named_event
from app.engine.request import Usage

#: Stores a finished response and returns whether it is stored; awaited before the client gets the last event.
StoreResponse: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[bool]]


def response_body(
    task: GenerationTask,
    body: ResponsesRequest,
    blocks: Sequence[Block],
    end: BlocksDone | None,
    stored_id: str | None = None,
) -> dict[str, Any]:
    """A response; in progress if `end` is None. `stored_id`: its id in the store, if it is stored."""
    is_cut = end is not None and end.reason == "length"
    status = "in_progress" if end is None else "incomplete" if is_cut else "completed"
    same = ("model", "instructions", "max_output_tokens", "temperature", "top_p", "parallel_tool_calls", "tool_choice")
    fields = body.model_dump(mode="json", by_alias=True, include={*same, "text", "tools"})
    sampling = task.requests[0].sampling  # an adapter may have its own defaults
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p") if name not in body.model_fields_set}
    return (
        {name: fields[name] for name in same}
        | drawn
        | {
            "id": stored_id or answer_id(task, "resp"),
            "object": "response",
            "created_at": int(task.requests[0].arrival_s),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                _item(task, body, block, "incomplete" if is_cut and block is blocks[-1] else "completed", stored_id)
                for block in blocks
            ],
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": stored_id is not None,
            "text": fields["text"] if (fields["text"] or {}).get("format") else {"format": {"type": "text"}},
            "tools": fields["tools"] or [],
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None if end is None else _usage(end.usage),
        }
    )


async def response_events(
    task: GenerationTask,
    body: ResponsesRequest,
    stored_id: str | None,
    store: StoreResponse | None,
    numbers: Iterator[int],
) -> AsyncGenerator[bytes]:
    """The events of a streamed response; `numbers` gives their sequence numbers."""
    blocks: list[Block] = []
    is_started = False
    async with aclosing(block_events(task)) as source:
        async for change in source:
            prefix = b""
            if not is_started:
                is_started, started = True, response_body(task, body, [], None, stored_id)
                for kind in ("response.created", "response.in_progress"):
                    prefix += _event(numbers, kind, response=started)
            if isinstance(change, BlocksDone):
                ended = response_body(task, body, blocks, change, stored_id)
                if store is not None:
                    ended["store"] = await store(ended)
                yield prefix + _event(numbers, f"response.{ended['status']}", response=ended)
            else:
                if change.what == "open":
                    blocks.append(change.block)
                yield prefix + b"".join(_block_events(task, body, change, numbers, stored_id))


def response_error_event(answer: ErrorReply, numbers: Iterator[int]) -> bytes:
    """An error as a stream event. OpenAI's clients raise it because of `error`; others read the fields beside it."""
    error = answer.body["error"]
    return _event(numbers, "error", code=error["code"], message=error["message"], param=error["param"], error=error)


def _block_events(
    task: GenerationTask, body: ResponsesRequest, change: BlockEvent, numbers: Iterator[int], stored_id: str | None
) -> Iterator[bytes]:
    block = change.block
    output: dict[str, Any] = {"output_index": block.index}
    content = output | {"item_id": _id(task, block, stored_id)} | ({"content_index": 0} if block.kind == "text" else {})
    logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
    what = "output_text" if block.kind == "text" else "function_call_arguments"
    if change.what == "open":
        empty = Block(block.index, block.kind, block.id, block.name)
        item = _item(task, body, empty, "in_progress", stored_id) | ({"content": []} if block.kind == "text" else {})
        yield _event(numbers, "response.output_item.added", **output, item=item)
        if block.kind == "text":
            yield _event(numbers, "response.content_part.added", **content, part=_part(""))
    elif change.what == "grow":
        yield _event(numbers, f"response.{what}.delta", **content, delta=change.piece, **logprobs)
    else:
        status = "incomplete" if change.is_cut else "completed"
        if block.kind == "text":
            yield _event(numbers, "response.output_text.done", **content, text=block.text, **logprobs)
            yield _event(numbers, "response.content_part.done", **content, part=_part(block.text))
        else:
            done = {"arguments": block.text, "name": body.call_names(block.name)["name"]}
            yield _event(numbers, "response.function_call_arguments.done", **content, **done)
        item = _item(task, body, block, status, stored_id)
        yield _event(numbers, "response.output_item.done", **output, item=item)


def _event(numbers: Iterator[int], kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"sequence_number": next(numbers), **fields})


def _item(
    task: GenerationTask, body: ResponsesRequest, block: Block, status: str, stored_id: str | None
) -> dict[str, Any]:
    if block.kind == "text":
        kind = {"type": "message", "role": "assistant", "content": [_part(block.text)]}
    else:
        kind = {"type": "function_call", "call_id": block.id, "arguments": block.text, **body.call_names(block.name)}
    return {"id": _id(task, block, stored_id), "status": status} | kind


def _id(task: GenerationTask, block: Block, stored_id: str | None) -> str:
    """An item's id: unique, which the request's id is not if clients choose it. A stored response's items have its id
    in theirs."""
    prefix = "msg" if block.kind == "text" else "fc"
    unique = stored_id or task.requests[0].request_id.removeprefix("chatcmpl-").removesuffix("-0")
    return f"{prefix}_{unique.removeprefix('resp_')}_{block.index}"


def stored_response_of(item_id: str) -> str | None:
    """The id of the stored response that may have an output item of this id; None if none can."""
    found = re.fullmatch(r"(?:msg|fc)_([0-9a-f]{32})_\d+", item_id, re.ASCII)
    return None if found is None else f"resp_{found[1]}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0, 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
