"""Speculative decoding: adds draft tokens to a step and keeps those that the model would have drawn.

A token counts if it was drawn from the logits after the answer's own tokens; a draft token only makes these logits
available earlier. So an answer has the same bits with any draft and with none. The scheduler decides which sequences
run and which are preempted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from app.engine.batch import ForwardOutput
from app.engine.config import Speculation
from app.engine.meter import EngineMeter
from app.engine.pools.block_pool import BlockPool
from app.engine.sequence import DraftLength, Sequence
from app.engine.spec_decode.ngram_proposer import NOTHING, Ids, propose_ngram, propose_predicted

#: Rows of a step, one per decoding sequence included, up to which "auto" adds draft tokens. On two cores with AVX-512 a
#: step of 8 rows takes twice as long as one of a single row, and each row beyond that as much as the first
#: (docs/reference/performance.md).
AUTO_ROWS = 8


class VerifiedTokens(NamedTuple):
    """The tokens that one sequence's rows add to its answer, and the number of rejected draft tokens."""

    token_ids: tuple[int, ...]
    num_rejected: int


class SpecDecoder:
    """The draft tokens of one engine."""

    def __init__(
        self,
        setting: Speculation,
        blocks: BlockPool,
        meter: EngineMeter,
        *,
        max_num_batched_tokens: int,
        num_draft_rows: int,
    ) -> None:
        """`num_draft_rows`: as in BackendLimits; 0 switches it off."""
        self._is_auto = setting == "auto"
        self._max_draft_tokens = 0 if setting == "off" else num_draft_rows if setting == "auto" else setting
        self._blocks = blocks
        self._meter = meter
        self._max_tokens = max_num_batched_tokens
        self._num_rows = num_draft_rows

    def add_drafts(self, items: list[tuple[Sequence, int]], num_running: int) -> list[tuple[Sequence, int]]:
        """The same items, with draft tokens for decoding sequences as far as rows and blocks are free."""
        if not self._max_draft_tokens or not self._num_rows:
            return items
        decoding = [i for i, (sequence, count) in enumerate(items) if _is_decoding(sequence, count)]
        if self._is_auto:
            room = min(AUTO_ROWS - len(decoding), self._num_rows) if len(decoding) == len(items) else 0
        else:
            room = self._num_rows
        room = min(room, self._max_tokens - sum(count for _, count in items))
        for num_left, index in zip(range(len(decoding), 0, -1), decoding, strict=True):
            if room <= 0:
                break
            sequence = items[index][0]
            self._add_draft(sequence, min(-(-room // num_left), self._max_draft_tokens), num_running)
            items[index] = (sequence, 1 + sequence.num_draft_tokens)
            room -= sequence.num_draft_tokens
        return items

    def verify(self, sequence: Sequence, output: ForwardOutput, first_row: int) -> VerifiedTokens:
        """Append the tokens drawn for a sequence, as far as each follows from the ones before.

        `first_row` of `output` is the sequence's first; one row per draft token follows. A row whose mask could not be
        computed, or whose logits overflowed, is left to the next step, which computes it first.
        """
        draft_ids = sequence.draft_ids.tolist()
        sequence.num_draft_tokens = 0
        num_sure = 1 + len(draft_ids) if sequence.constraint is None else sequence.constraint.num_sure
        token_ids: list[int] = []
        num_accepted = 0
        for index in range(1 + len(draft_ids)):
            if index and (index >= num_sure or first_row + index in output.overflowed):
                break
            token_id = int(output.token_ids[first_row + index])
            sequence.append(token_id)
            token_ids.append(token_id)
            if index == len(draft_ids) or token_id != draft_ids[index]:
                break
            num_accepted += 1
        if draft_ids:
            sequence.draft_length.observe(len(draft_ids), num_accepted)
            self._meter.count_draft_tokens(len(draft_ids), num_accepted)
        return VerifiedTokens(tuple(token_ids), len(draft_ids) - num_accepted)

    def _add_draft(self, sequence: Sequence, room: int, num_running: int) -> None:
        """Add up to `room` draft tokens to the sequence, with blocks for them."""
        room = min(room, sequence.max_tokens - sequence.num_output - 1)
        if room <= 0:
            return
        draft_tokens = self._choose_draft(sequence, room)
        if not len(draft_tokens):
            return
        num_new = sequence.num_blocks_for(sequence.num_tokens + len(draft_tokens)) - sequence.num_blocks
        if num_new > 0 and self._blocks.num_free >= num_running + num_new:
            blocks = self._blocks.allocate(num_new)
            assert blocks is not None, "free blocks were counted"
            sequence.count_held(self._meter.now_s)
            sequence.add_blocks(blocks)
        sequence.set_draft_tokens(draft_tokens[: sequence.num_blocks * sequence.block_size - sequence.num_tokens])

    def _choose_draft(self, sequence: Sequence, room: int) -> Ids:
        """Tokens that the grammar forces, else tokens from a prediction or the text so far that the grammar allows."""
        matcher = None
        if sequence.constraint is not None:
            matcher = sequence.constraint.matcher_after(sequence.output_ids)
            if matcher is None:
                return NOTHING
            if length := self._length(sequence.forced_draft_length, room):
                forced = _until_end(sequence, np.array(matcher.forced_token_ids()[:length], np.int32))
                if len(forced):
                    sequence.draft_length = sequence.forced_draft_length
                    return forced
        length = self._length(sequence.ngram_draft_length, room)
        draft = _until_end(sequence, _propose(sequence, length)) if length else NOTHING
        sequence.draft_length = sequence.ngram_draft_length
        return draft if matcher is None or not len(draft) else draft[: matcher.num_allowed(draft.tolist())]

    def _length(self, draft_length: DraftLength, room: int) -> int:
        return min(draft_length.length(), room) if self._is_auto else room


def _is_decoding(sequence: Sequence, count: int) -> bool:
    return count == 1 and sequence.num_pending == 1 and sequence.pooling is None and sequence.has_memory


def _propose(sequence: Sequence, length: int) -> Ids:
    if len(sequence.prediction):
        draft_tokens = propose_predicted(sequence.output_ids, sequence.prediction, length)
        if len(draft_tokens):
            return draft_tokens
    return propose_ngram(sequence.token_ids[: sequence.num_tokens], length)


def _until_end(sequence: Sequence, draft_tokens: Ids) -> Ids:
    """The draft up to the first token that would end the answer: the row before draws that one by itself."""
    for index, token_id in enumerate(draft_tokens.tolist()):
        if token_id in sequence.end_ids:
            return draft_tokens[:index]
    return draft_tokens
