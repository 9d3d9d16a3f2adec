"""Latent attention on the CPU inside XLA programs: the write of latents, and attention, as one call.

In: queries that have been taken to latents, rotated parts, the memory of all layers, a step's queries. Out: per head a
sum of latents, and the memory, in place: latents are written and read where they lie. Rows of no task are not defined.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from app.kernels.latent_attention.cpu import latent_attention
from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import leave, take
from app.kernels.paged_attention.xla import Queries
from app.kernels.xla_call import Floats2, Floats5, Ints1, Ints2, KernelCall, Number, Real, reader, team_of


class _Operands(NamedTuple):
    layer: Number
    num_rows: Number
    num_tasks: Number
    scale: Real
    absorbed: Floats2
    rotated: Floats2
    rows: Floats2
    latents: Floats5
    kv_slots: Ints1
    tasks: Ints2
    query_starts: Ints1
    seq_lens: Ints1
    block_tables: Ints2


class _Results(NamedTuple):
    attended: Floats2
    latents: Floats5


_operands, _results = reader(_Operands), reader(_Results, after=_Operands)


@compiled
def _store(team, phase, rows, kv_slots, memory):
    """Write rows [T, R + E] to the tokens' places in memory [blocks, 1, block_size, W]. One phase."""
    num_tokens, width, block_size, done = rows.shape[0], rows.shape[1], memory.shape[2], 0
    t = take(team, phase)
    while t < num_tokens:
        block = kv_slots[t] // block_size
        memory[block, 0, kv_slots[t] - block * block_size, :width] = rows[t]
        done += 1
        t = take(team, phase)
    return leave(team, phase, num_tokens, done)


def _store_and_attend(record: int) -> None:
    given, found, team = _operands(record), _results(record), team_of(record)
    memory, num_heads = found.latents[given.layer], given.absorbed.shape[0] // given.rotated.shape[0]
    _store(team, 0, given.rows[: given.num_rows], given.kv_slots, memory)
    latent_attention(
        team, 1, given.rotated, found.attended, num_heads, 0, given.rotated.shape[1] // num_heads, given.scale,
        given.tasks[: given.num_tasks], given.query_starts, given.seq_lens, given.block_tables, memory,
    )  # fmt: skip


_call = KernelCall(
    "store_and_attend_latents", _Operands, _Results, _store_and_attend, {"attended": "absorbed", "latents": "latents"}
)  # fmt: skip


def store_and_attend(
    absorbed: Array, rotated: Array, rows: Array, latents: Array, queries: Queries, layer: Array, scale: Array
) -> tuple[Array, Array]:
    """As `app.kernels.latent_attention.xla.store_and_attend`, with latents [L, blocks, 1, block_size, W], W = R + E
    rounded up to 16."""
    num_tokens, num_heads, kv_rank = absorbed.shape
    by_head = absorbed.swapaxes(0, 1).reshape(-1, kv_rank)  # head h of token t in row h * T + t
    operands = _Operands(
        layer, queries.num_rows, queries.num_tasks, scale, by_head, rotated.reshape(num_tokens, -1), rows, latents,
        queries.kv_slots, queries.tasks, queries.query_starts, queries.seq_lens, queries.block_tables,
    )  # fmt: skip
    attended, new_latents = _call(operands, (by_head.shape, latents.shape))
    return attended.reshape(num_heads, num_tokens, kv_rank).swapaxes(0, 1), new_latents
