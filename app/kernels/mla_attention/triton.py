"""Latent attention on the GPU, directly on latents: decoding and prefill chunks in one kernel.

Queries are taken to latents first, paged memory holds one latent and one rotated part per token, and the result is per
head a sum of latents. A program serves up to sixteen heads of a few consecutive queries: a latent is loaded once for
their scores and sums. Splits of long sequences, their order and batch-invariant mode are those of
`app.kernels.paged_attention.triton`, whose parts are used. No configuration of tiles has been measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.paged_attention.triton import _merge, _merge_parts, _splits, _tile, _write
from app.kernels.tuning import ENOUGH_PROGRAMS, ceil_div, next_power_of_two

#: Keys of a tile; keys of one split in batch-invariant mode; the most programs that share a sequence's splits.
_BLOCK_KEYS, _SPLIT_KEYS, _MAX_PROGRAMS = 32, 512, 64
#: Queries times heads of a program.
_BLOCK_ROWS = 16


def rotate_and_store(
    queries: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    memory: torch.Tensor,
    kv_slots: torch.Tensor,
    *,
    num_heads: int,
) -> None:
    """Rotate the last E numbers of queries [T, N * (P + E)] by head and of latents [T, R + E], in place; store latents.

    Neighbouring pairs are rotated; cos, sin: [positions, E / 2] float32. memory: [blocks, 1, block_size, R + E];
    kv_slots: [T] int64; a slot beyond the memory is padding and not written. Raises ValueError for operands that do not
    fit.
    """
    (num_rows, width), half = latents.shape, cos.shape[1]
    num_blocks, _, block_size, _ = memory.shape
    fits = memory.shape == (num_blocks, 1, block_size, width) and cos.shape == sin.shape and 2 * half < width
    if not fits or len(queries) != num_rows or queries.shape[1] % num_heads or kv_slots.shape != (num_rows,):
        raise ValueError(
            f"operands of latents do not fit: queries {tuple(queries.shape)} of {num_heads} heads, latents "
            f"{tuple(latents.shape)}, memory {tuple(memory.shape)}, cos {tuple(cos.shape)}"
        )
    if num_rows == 0:
        return
    _rotate_latents[(num_rows, num_heads + 1)](
        queries, latents, positions, cos, sin, memory, kv_slots, num_blocks * block_size, queries.stride(0),
        latents.stride(0), cos.stride(0), memory.stride(0), memory.stride(2), NUM_HEADS=num_heads,
        HEAD_SIZE=queries.shape[1] // num_heads, RANK=width - 2 * half, HALF=half, BLOCK_SIZE=block_size,
        BLOCK_RANK=next_power_of_two(width - 2 * half), BLOCK_HALF=next_power_of_two(half), num_warps=1,
        enable_fp_fusion=True,  # one warp: no thread without a pair of its own, and 16 bytes of a latent per load
    )  # fmt: skip


def latent_attention(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    memory: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool = False,
) -> None:
    """out [T, N, R]: every head's sum of latents over the keys that a query sees, weighed by its softmax.

    absorbed: [T, N, R]; rotated: [T, N, E]; memory: [blocks, 1, block_size, R + E]. query_starts: [B+1], seq_lens: [B],
    block_tables: [B, M] int32. max_query_len, max_seq_len: at least the largest of the batch. Rows no sequence covers
    are not written. ValueError for operands that do not fit.
    """
    (num_tokens, num_heads, rank), turned, num_sequences = absorbed.shape, rotated.shape[2], len(seq_lens)
    fits = rotated.shape[:2] == (num_tokens, num_heads) and memory.shape[1] == 1 and out.shape == absorbed.shape
    if not fits or memory.shape[3] != rank + turned or any(t.stride(-1) != 1 for t in (absorbed, rotated, memory, out)):
        raise ValueError(
            f"operands of latents do not fit: absorbed {tuple(absorbed.shape)}, rotated {tuple(rotated.shape)}, memory "
            f"{tuple(memory.shape)}, out {tuple(out.shape)}; the last dimension is contiguous"
        )
    if num_tokens == 0 or num_sequences == 0:
        return
    group = max(size for size in range(1, _BLOCK_ROWS + 1) if num_heads % size == 0)
    is_decode, block_queries = max_query_len == 1, _BLOCK_ROWS // group
    num_tiles = num_sequences if is_decode else num_tokens // block_queries + num_sequences
    if batch_invariant:
        num_programs = min(ceil_div(max_seq_len, _SPLIT_KEYS), _MAX_PROGRAMS) if is_decode else 1
    else:
        busy = max(num_tiles * (num_heads // group), 1)
        wanted = min(ENOUGH_PROGRAMS // busy, ceil_div(max_seq_len, 4 * _BLOCK_KEYS))
        num_programs = next_power_of_two(max(1, min(wanted, _MAX_PROGRAMS)))
    fixed_keys = ceil_div(_SPLIT_KEYS, _BLOCK_KEYS) * _BLOCK_KEYS if batch_invariant else 0
    num_splits = ceil_div(max_seq_len, fixed_keys) if batch_invariant else num_programs
    has_parts = num_programs > 1
    parts, states = out, out  # never touched unless there are parts
    if has_parts:
        parts = torch.empty((num_splits, *absorbed.shape), dtype=torch.float32, device=out.device)
        states = torch.empty((num_splits, num_tokens, num_heads, 2), dtype=torch.float32, device=out.device)
    arguments = {
        "IS_DECODE": is_decode,
        "GROUP": group,
        "NUM_HEADS": num_heads,
        "DIM": rank,
        "BLOCK_DIM": max(16, next_power_of_two(rank)),
        "BLOCK_ROWS": _BLOCK_ROWS,
        "BLOCK_KEYS": _BLOCK_KEYS,
        "FIXED_KEYS": fixed_keys,
        "NUM_PROGRAMS": num_programs,
        "num_warps": 8,
        "enable_fp_fusion": not batch_invariant,
    }
    _attend_latents[(num_tiles, num_heads // group, num_programs)](
        absorbed, rotated, memory, query_starts, seq_lens, block_tables, out, parts, states, num_tokens,
        num_sequences, scale, absorbed.stride(0), absorbed.stride(1), rotated.stride(0), rotated.stride(1),
        memory.stride(0), memory.stride(2), block_tables.stride(0), out.stride(0), out.stride(1),
        BLOCK_SIZE=memory.shape[2], HAS_PARTS=has_parts, PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        TURNED=turned, BLOCK_TURNED=max(16, next_power_of_two(turned)), num_stages=2, **arguments,
    )  # fmt: skip
    if has_parts:
        _merge_parts[(num_tiles, num_heads // group)](
            parts, states, out, query_starts, seq_lens, out, num_tokens, num_sequences, out.stride(0), out.stride(1),
            WINDOW=0, HAS_SINKS=False, **arguments,
        )  # fmt: skip


@triton.jit
def _rotate_latents(
    queries, latents, positions, cos, sin, memory, kv_slots, num_kv_slots, queries_row, latents_row, angles_row,
    memory_block, memory_key, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, RANK: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Grid: (T, heads and one more, which has the latent)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    position = tl.load(positions + t).to(tl.int64)
    c = tl.load(cos + position * angles_row + i, mask=inside, other=0.0)
    s = tl.load(sin + position * angles_row + i, mask=inside, other=0.0)
    at = queries + t * queries_row + head * HEAD_SIZE + HEAD_SIZE - 2 * HALF
    if head == NUM_HEADS:
        at = latents + t * latents_row + RANK
    first = tl.load(at + 2 * i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
    turned_first = (first * c - second * s).to(queries.dtype.element_ty)
    turned_second = (second * c + first * s).to(queries.dtype.element_ty)
    tl.store(at + 2 * i, turned_first, mask=inside)
    tl.store(at + 2 * i + 1, turned_second, mask=inside)
    kv_slot = tl.load(kv_slots + t)
    if (head == NUM_HEADS) & (kv_slot < num_kv_slots):
        to = memory + kv_slot // BLOCK_SIZE * memory_block + kv_slot % BLOCK_SIZE * memory_key
        j = tl.arange(0, BLOCK_RANK)
        latent = tl.load(latents + t * latents_row + j, mask=j < RANK, other=0.0)
        tl.store(to + j, latent, mask=j < RANK)
        tl.store(to + RANK + 2 * i, turned_first, mask=inside)
        tl.store(to + RANK + 2 * i + 1, turned_second, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])  # or each new batch size would trigger a compilation
def _attend_latents(
    absorbed, rotated, memory, query_starts, seq_lens, block_tables, out, parts, states, num_tokens, num_sequences,
    scale, absorbed_row, absorbed_head, rotated_row, rotated_head, memory_block, memory_key, table_row, out_row,
    out_head, BLOCK_SIZE: tl.constexpr, HAS_PARTS: tl.constexpr, PRECISION: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_TURNED: tl.constexpr, IS_DECODE: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    FIXED_KEYS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles, groups of heads, NUM_PROGRAMS). Program z takes splits z, z + NUM_PROGRAMS, …"""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sequence, tile = _tile(query_starts, num_sequences, IS_DECODE, BLOCK_ROWS // GROUP)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if tile * (BLOCK_ROWS // GROUP) >= num_queries:
        return
    row = tl.arange(0, BLOCK_ROWS)
    query = tile * (BLOCK_ROWS // GROUP) + row // GROUP
    live = (row < BLOCK_ROWS // GROUP * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_DIM)
    e = tl.arange(0, BLOCK_TURNED)
    before = tl.load(seq_lens + sequence) - num_queries  # keys older than the first query of the chunk
    low, high, span, num_splits = _splits(
        before, tile, num_queries, BLOCK_ROWS // GROUP, BLOCK_KEYS, 0, FIXED_KEYS, NUM_PROGRAMS
    )
    own_at = absorbed + token[:, None] * absorbed_row + head[:, None] * absorbed_head + d[None, :]
    own = tl.load(own_at, mask=live[:, None] & (d[None, :] < DIM), other=0.0)
    turned_at = rotated + token[:, None] * rotated_row + head[:, None] * rotated_head + e[None, :]
    turned = tl.load(turned_at, mask=live[:, None] & (e[None, :] < TURNED), other=0.0)
    visible = tl.where(live, before + query + 1, 0)  # [BLOCK_ROWS], keys below it
    table = block_tables + sequence.to(tl.int64) * table_row

    all_sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    all_weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    all_top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for split in range(tl.program_id(2), num_splits, NUM_PROGRAMS):
        first = low + split * span
        if HAS_PARTS or FIXED_KEYS > 0:
            sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
            weight = tl.zeros((BLOCK_ROWS,), tl.float32)
            top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        else:  # one split, and no registers for a second set of sums
            sums, weight, top = all_sums, all_weight, all_top
        for key_start in range(first, tl.minimum(first + span, high), BLOCK_KEYS):
            key = key_start + tl.arange(0, BLOCK_KEYS)
            ours = key < high
            block = tl.load(table + key // BLOCK_SIZE, mask=ours, other=0).to(tl.int64)
            at = memory + block * memory_block + (key % BLOCK_SIZE).to(tl.int64) * memory_key
            latent = tl.load(at[:, None] + d[None, :], mask=ours[:, None] & (d[None, :] < DIM), other=0.0)
            k_at = at[None, :] + DIM + e[:, None]
            k_turned = tl.load(k_at, mask=ours[None, :] & (e[:, None] < TURNED), other=0.0)
            scores = tl.dot(own, tl.trans(latent), input_precision=PRECISION)  # [BLOCK_ROWS, BLOCK_KEYS]
            scores = tl.dot(turned, k_turned, scores, input_precision=PRECISION) * scale
            scores = tl.where(key[None, :] < visible[:, None], scores * LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            weight = weight * decay + tl.sum(p, axis=1)
            sums = tl.dot(p.to(latent.dtype), latent, sums * decay[:, None], input_precision=PRECISION)
            top = new_top
        if HAS_PARTS:
            at_part = (token + split * num_tokens) * NUM_HEADS + head
            tl.store(parts + at_part[:, None] * DIM + d[None, :], sums, mask=live[:, None] & (d[None, :] < DIM))
            tl.store(states + at_part * 2, top, mask=live)
            tl.store(states + at_part * 2 + 1, weight, mask=live)
        elif FIXED_KEYS > 0:
            all_sums, all_weight, all_top = _merge(all_sums, all_weight, all_top, sums, weight, top)
        else:
            all_sums, all_weight, all_top = sums, weight, top
    if not HAS_PARTS:
        _write(out, all_sums, all_weight, all_top, out, token, head, d, live, out_row, out_head, DIM, False)
