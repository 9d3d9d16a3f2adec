"""An answer as a row of blocks: text, and calls of tools. What /v1/responses and /v1/messages tell answers as.

In: a job of one sequence. Out: what happens to its blocks, in order. Rule: one block is open at a time, and each is
closed; joined, the pieces of a block are what it holds at its end.
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
    """`id` and `name` are a call's; `text` is what it holds so far, of a call its arguments."""

    index: int
    kind: Literal["text", "call"]
    id: str = ""
    name: str = ""
    text: str = ""


class BlockEvent(NamedTuple):
    """What happens to a block."""

    what: Literal["open", "grow", "close"]
    block: Block
    piece: str = ""


class BlocksDone(NamedTuple):
    """The answer is over; `usage` is what it has cost, `stop` the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage | None
    stop: str | None = None


async def block_events(job: GenerationTask) -> AsyncGenerator[BlockEvent | BlocksDone]:
    """Raises what the sequence raises; closing the generator aborts it."""
    reader = None if job.tools is None else job.tools.reader(job.requests[0].request_id)
    block: Block | None = None
    async with aclosing(job.deltas()) as deltas:
        async for _, delta in deltas:
            is_last = delta.finish_reason is not None
            pieces: list[Piece] = [delta.text] if delta.text else []
            for piece in pieces if reader is None else reader.push(delta.text, is_last=is_last):
                opened = _next_block(piece, block)
                if opened is not None:
                    if block is not None:
                        yield BlockEvent("close", block)
                    block = opened
                    yield BlockEvent("open", block)
                assert block is not None, "arguments follow the beginning of their call"
                text = piece if isinstance(piece, str) else piece.piece if isinstance(piece, ToolCallArguments) else ""
                if text:
                    block.text += text
                    yield BlockEvent("grow", block, text)
            if delta.finish_reason is not None:
                if block is not None:
                    yield BlockEvent("close", block)
                yield BlocksDone(delta.finish_reason, delta.usage, delta.stop)


def _next_block(piece: Piece, block: Block | None) -> Block | None:
    """The block that a piece begins, if it does not belong to the present one."""
    index = 0 if block is None else block.index + 1
    if isinstance(piece, ToolCallStart):
        return Block(index, "call", piece.id, piece.name)
    return Block(index, "text") if isinstance(piece, str) and (block is None or block.kind != "text") else None


async def collect_blocks(job: GenerationTask) -> tuple[list[Block], BlocksDone]:
    """The whole answer."""
    blocks: list[Block] = []
    async with aclosing(block_events(job)) as source:
        async for change in source:
            if isinstance(change, BlocksDone):
                return blocks, change
            if change.what == "open":
                blocks.append(change.block)
    raise AssertionError("a sequence ends with a reason or an error")
