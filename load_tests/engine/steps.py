"""Build a `ForwardBatch` by hand: what the scheduler would, without one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch, SamplingBatch


class Piece(NamedTuple):
    """Some consecutive tokens of one sequence: their ids, first position, block table, adapter slot."""

    token_ids: NDArray[np.integer]
    start: int
    table: NDArray[np.integer]
    adapter_slot: int = 0


def greedy(count: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        min_p=np.zeros(count, np.float32),
        presence=np.zeros(count, np.float32),
        frequency=np.zeros(count, np.float32),
        repetition=np.ones(count, np.float32),
        seeds=np.zeros(count, np.uint64),
        positions=np.zeros(count, np.int64),
        num_logprobs=np.full(count, -1, np.int32),
        history=tuple(np.empty(0, np.int32) for _ in range(count)),
        prompt_lens=np.zeros(count, np.int32),
    )


def forward_batch(pieces: list[Piece], block_size: int) -> ForwardBatch:
    """Every piece samples its last token. Pieces are sorted by adapter slot; see `ForwardBatch`."""
    pieces = sorted(pieces, key=lambda p: p.adapter_slot)
    counts = [len(p.token_ids) for p in pieces]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    positions = [np.arange(p.start, p.start + n) for p, n in zip(pieces, counts, strict=True)]
    kv_slots = [
        p.table[where // block_size].astype(np.int64) * block_size + where % block_size
        for p, where in zip(pieces, positions, strict=True)
    ]
    tables = np.zeros((len(pieces), max(len(p.table) for p in pieces)), np.int32)
    for row, piece in enumerate(pieces):
        tables[row, : len(piece.table)] = piece.table
    adapter_slots = np.array([p.adapter_slot for p in pieces])
    changes = np.flatnonzero(np.diff(adapter_slots)) + 1
    return ForwardBatch(
        token_ids=np.concatenate([p.token_ids for p in pieces]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        kv_slots=np.concatenate(kv_slots),
        query_starts=starts,
        seq_lens=np.array([p.start + n for p, n in zip(pieces, counts, strict=True)], np.int32),
        block_tables=tables,
        run_starts=np.concatenate([[0], starts[changes], [starts[-1]]]).astype(np.int32),
        run_adapter_slots=adapter_slots[np.concatenate([[0], changes])].astype(np.int32),
        sample_rows=(starts[1:] - 1).astype(np.int32),
        sample_seqs=np.arange(len(pieces), dtype=np.int32),
        sampling=greedy(len(pieces)),
    )
