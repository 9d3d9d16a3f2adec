"""Server-sent events of streamed chats and completions, made from text deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.serializers.detokenizer import TextDelta
from app.deployments.ingress.serializers.openai import ChatSerializer, TokenOffsets, num_chars


def sse(body: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % to_json(body)


def sse_bodies(events: bytes) -> Iterator[dict[str, Any]]:
    """The bodies of one or several events of `sse`."""
    for event in events.split(b"\n\n")[:-1]:
        yield from_json(event.removeprefix(b"data: "))


async def completion_events(task: GenerationTask, serializer: ChatSerializer) -> AsyncGenerator[bytes]:
    """The events of a streamed chat or completion, one or several in each piece."""
    offsets = [TokenOffsets(serializer.text_bytes) for _ in task.requests]
    started = [not serializer.is_chat] * len(task.requests)
    readers = [serializer.reader(index) for index in range(len(task.requests))]
    texts = [serializer.text_event(index) for index in range(len(task.requests))]
    is_plain = serializer.is_plain and serializer.tools is None
    async with aclosing(task.deltas()) as deltas:
        async for index, delta in deltas:
            if is_plain and started[index] and delta.finish_reason is None:
                before, after = texts[index]  # the common case: only the text differs
                yield before + to_json(delta.text) + after
                continue
            reader = readers[index]
            if reader is not None:
                event = b"".join(map(sse, serializer.tool_events(index, delta, offsets[index], reader)))
            else:
                event = await in_worker_if_long(
                    num_chars(delta), partial(_event, serializer, index, delta, offsets[index])
                )
            if not started[index]:
                started[index] = True
                event = sse(serializer.role_event(index)) + event
            if event:
                yield event
    if serializer.include_usage:
        yield sse(serializer.usage_event(task.usages, task.num_per_prompt))


def _event(serializer: ChatSerializer, index: int, delta: TextDelta, offsets: TokenOffsets) -> bytes:
    return sse(serializer.event(index, delta, offsets))
