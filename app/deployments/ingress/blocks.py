"""An answer as a row of blocks: text, and calls of tools. What /v1/responses and /v1/messages tell answers as.

In: a job of one sequence. Out: what happens to its blocks, in order. Rule: one block is open at a time, and each is
closed; joined, the pieces of a block are what it holds at its end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.deployments.ingress.job import Job
from app.deployments.ingress.tool_calls import CallArguments, CallBegin, Piece
from app.engine.request import FinishReason, Usage


@dataclass(slots=True)
class Block:
    """`id` and `name` are a call's; `text` is what it holds so far, of a call its arguments."""

    index: int
    kind: Literal["text", "call"]
    id: str = ""
    name: str = ""
    text: str = ""


class Change(NamedTuple):
    """What happens to a block."""

    what: Literal["open", "grow", "close"]
    block: Block
    piece: str = ""


class End(NamedTuple):
    """The answer is over; `usage` is what it has cost, `stop` the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage | None
    stop: str | None = None


async def changes(job: Job) -> AsyncGenerator[Change | End]:
    """Raises what the sequence raises; closing the generator aborts it."""
    reader = None if job.tools is None else job.tools.reader(job.requests[0].request_id)
    block: Block | None = None
    async with aclosing(job.deltas()) as deltas:
        async for _, delta in deltas:
            is_last = delta.finish_reason is not None
            pieces: list[Piece] = [delta.text] if delta.text else []
            for piece in pieces if reader is None else reader.push(delta.text, is_last=is_last):
                opened = _opened_by(piece, block)
                if opened is not None:
                    if block is not None:
                        yield Change("close", block)
                    block = opened
                    yield Change("open", block)
                assert block is not None, "arguments follow the beginning of their call"
                text = piece if isinstance(piece, str) else piece.piece if isinstance(piece, CallArguments) else ""
                if text:
                    block.text += text
                    yield Change("grow", block, text)
            if delta.finish_reason is not None:
                if block is not None:
                    yield Change("close", block)
                yield End(delta.finish_reason, delta.usage, delta.stop)


def _opened_by(piece: Piece, block: Block | None) -> Block | None:
    """The block that a piece begins, if it does not belong to the present one."""
    index = 0 if block is None else block.index + 1
    if isinstance(piece, CallBegin):
        return Block(index, "call", piece.id, piece.name)
    return Block(index, "text") if isinstance(piece, str) and (block is None or block.kind != "text") else None


async def finished(job: Job) -> tuple[list[Block], End]:
    """The whole answer."""
    blocks: list[Block] = []
    async with aclosing(changes(job)) as source:
        async for change in source:
            if isinstance(change, End):
                return blocks, change
            if change.what == "open":
                blocks.append(change.block)
    raise AssertionError("a sequence ends with a reason or an error")
