"""An answer as a sequence of content blocks, text and tool calls, for /v1/responses and /v1/messages.

At most one block is open at a time, and every block is closed. The joined pieces of a block are its final text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.serializers.tool_parser import Piece, ToolCallArguments, ToolCallStart
from app.engine.request import FinishReason, Usage


@dataclass(slots=True)
class Block:
    """`id` and `name` are a tool call's; `text` is the text or the arguments so far."""

    index: int
    kind: Literal["text", "call"]
    id: str = ""
    name: str = ""
    text: str = ""


class BlockEvent(NamedTuple):
    """A change of a block. `is_cut`: the limit of tokens closed it."""

    what: Literal["open", "grow", "close"]
    block: Block
    piece: str = ""
    is_cut: bool = False


class BlocksDone(NamedTuple):
    """The end of the answer; `stop` is the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage | None
    stop: str | None = None


def answer_id(task: GenerationTask, prefix: str) -> str:
    """The id of a task's answer as these APIs write it: `resp_…`, `msg_…`."""
    return f"{prefix}_{task.request_id.removeprefix('chatcmpl-')}"


async def block_events(task: GenerationTask) -> AsyncGenerator[BlockEvent | BlocksDone]:
    """The block events of a task with one sequence. Raises the sequence's errors; closing the generator aborts it."""
    reader = None if task.tools is None else task.tools.reader(task.requests[0].request_id)
    block: Block | None = None
    async with aclosing(task.deltas()) as deltas:
        async for _, delta in deltas:
            is_last = delta.finish_reason is not None
            pieces: list[Piece] = [delta.text] if delta.text else []
            for piece in pieces if reader is None else reader.push(delta.text, is_last=is_last):
                following = _next_block(piece, block)
                if following is not None:
                    if block is not None:
                        yield BlockEvent("close", block)
                    block = following
                    yield BlockEvent("open", block)
                assert block is not None, "arguments follow the start of their call"
                text = piece if isinstance(piece, str) else piece.piece if isinstance(piece, ToolCallArguments) else ""
                if text:
                    block.text += text
                    yield BlockEvent("grow", block, text)
            if delta.finish_reason is not None:
                if block is not None:
                    yield BlockEvent("close", block, is_cut=delta.finish_reason == "length")
                yield BlocksDone(delta.finish_reason, delta.usage, delta.stop)


def _next_block(piece: Piece, block: Block | None) -> Block | None:
    """The block that a piece opens; None if it continues the current one."""
    index = 0 if block is None else block.index + 1
    if isinstance(piece, ToolCallStart):
        return Block(index, "call", piece.id, piece.name)
    return Block(index, "text") if isinstance(piece, str) and (block is None or block.kind != "text") else None


async def collect_blocks(task: GenerationTask) -> tuple[list[Block], BlocksDone]:
    """The complete answer."""
    blocks: list[Block] = []
    async with aclosing(block_events(task)) as source:
        async for change in source:
            if isinstance(change, BlocksDone):
                return blocks, change
            if change.what == "open":
                blocks.append(change.block)
    raise AssertionError("a sequence ends with a finish reason or an error")
