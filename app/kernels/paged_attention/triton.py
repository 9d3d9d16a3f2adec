"""Paged attention on the GPU: decoding and prefill chunks in one kernel, long sequences cut into splits.

One program serves a few consecutive queries of a sequence times all heads that share a key head, so a key is read once
for the whole group. Keys come tile by tile with an online softmax in float32; keys beyond a sequence are never read, so
memory may hold anything there.

If queries alone do not fill the GPU, a sequence's keys are split over programs; each stores its sums and a second
kernel merges them in order, without atomics. With `batch_invariant=True` splits lie at fixed positions of the sequence
and are merged in the same order and shapes whether they were computed side by side (decoding) or one after the other
(prefill), without fused multiply-adds: a query's bits do not depend on chunking, the batch or length bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from app.kernels.tuning import ENOUGH_PROGRAMS, ceil_div, next_power_of_two, shape_key, tuned_config

#: Keys of one split in batch-invariant mode, and the most programs that share a sequence's splits.
_SPLIT_KEYS = 512
_MAX_PROGRAMS = 64


class Configuration(NamedTuple):
    """Static arguments: block_rows (queries x heads of a group) by block_keys; num_programs share a sequence's keys."""

    block_rows: int
    block_keys: int
    num_programs: int
    num_warps: int
    num_stages: int


def configuration(
    q: torch.Tensor,
    num_kv_heads: int,
    num_sequences: int,
    max_query_len: int,
    max_seq_len: int,
    *,
    batch_invariant: bool = False,
) -> Configuration:
    """The configuration of `paged_attention` for these shapes: measured on this device, or the rule of thumb.

    Rule: 16 rows while decoding, 64 otherwise, since a row is a query times a head; programs until the GPU is full. In
    batch-invariant mode the tile is always that of prefill. float32, without tensor cores, has registers for 16.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    if not batch_invariant:
        sizes = (next_power_of_two(num_tokens), num_heads, num_kv_heads, head_dim, min(max_query_len, 2), max_seq_len)
        if (found := tuned_config(q.device, shape_key("paged_attention", *sizes, dtype=q.dtype))) is not None:
            return Configuration(**found)
    is_decode = max_query_len == 1 and not batch_invariant
    is_small = is_decode or q.dtype.itemsize == 4
    block_rows = max(16 if is_small else 64, next_power_of_two(group))
    # Keys and values of a tile lie in shared memory several times over, 227 KB of it.
    block_keys = 64 if q.dtype.itemsize * head_dim <= 256 else 32
    tiles = ceil_div(num_tokens, block_rows // group) + (0 if is_decode else num_sequences)
    if batch_invariant:
        num_programs = min(ceil_div(max_seq_len, _SPLIT_KEYS), _MAX_PROGRAMS)
        num_programs = num_programs if max_query_len == 1 else 1
    else:
        wanted = min(ENOUGH_PROGRAMS // max(tiles * num_kv_heads, 1), ceil_div(max_seq_len, 4 * block_keys))
        num_programs = next_power_of_two(max(1, min(wanted, _MAX_PROGRAMS)))
    num_stages = 2 if q.dtype.itemsize * head_dim <= 256 else 1
    num_warps = 8 if head_dim > 64 and block_rows >= 64 else 4  # sums of 64 rows spill from the registers of four warps
    return Configuration(block_rows, block_keys, num_programs, num_warps, num_stages)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: Configuration | None = None,
) -> None:
    """out[t] = softmax(scale * q[t] K^T) V over the keys query t sees (Vaswani et al. 2017; Ainslie et al. 2023).

    q, out: [T, heads, D]. k_cache, v_cache: [blocks, kv_heads, block_size, D], any strides but D's. query_starts:
    [B+1], seq_lens: [B], block_tables: [B, M] int32. With a softcap, scores become softcap * tanh(score / softcap)
    (Gemma 2). sinks: [heads] float32, one more score of each head that has no value. max_query_len, max_seq_len: at
    least the largest of the batch. Rows no sequence covers are not written. Raises ValueError for operands that do not
    fit.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_sequences = seq_lens.shape[0]
    _check(q, k_cache, v_cache, query_starts, block_tables, out, num_sequences)
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"attention operands do not fit: {tuple(sinks.shape)} sinks for {num_heads} heads, float32")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a query sees at least itself, so give 1 or more, or None for all keys")
    if num_tokens == 0 or num_sequences == 0:
        return
    c = config or configuration(
        q, num_kv_heads, num_sequences, max_query_len, max_seq_len, batch_invariant=batch_invariant
    )
    group = num_heads // num_kv_heads
    block_queries = c.block_rows // group
    num_tiles = num_sequences if max_query_len == 1 else num_tokens // block_queries + num_sequences
    fixed_keys = ceil_div(_SPLIT_KEYS, c.block_keys) * c.block_keys if batch_invariant else 0
    num_splits = ceil_div(max_seq_len, fixed_keys) if batch_invariant else c.num_programs
    has_parts = c.num_programs > 1
    parts, states = out, out  # never touched without parts; the same for sinks
    of_heads = out if sinks is None else sinks
    if has_parts:
        # Per split, token and head: the weighted sum of values, then its maximum and its sum of weights.
        parts = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
        states = torch.empty((num_splits, num_tokens, num_heads, 2), dtype=torch.float32, device=q.device)
    arguments = {
        "IS_DECODE": max_query_len == 1,
        "GROUP": group,
        "NUM_HEADS": num_heads,
        "DIM": head_dim,
        "BLOCK_DIM": max(16, next_power_of_two(head_dim)),
        "BLOCK_ROWS": c.block_rows,
        "BLOCK_KEYS": c.block_keys,
        "WINDOW": window or 0,
        "HAS_SINKS": sinks is not None,
        "FIXED_KEYS": fixed_keys,
        "NUM_PROGRAMS": c.num_programs,
        "num_warps": c.num_warps,
        "enable_fp_fusion": not batch_invariant,
    }
    _attend[(num_tiles, num_kv_heads, c.num_programs)](
        q, k_cache, v_cache, query_starts, seq_lens, block_tables, out, parts, states, of_heads, num_tokens,
        num_sequences, scale, softcap or 0.0, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
        k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), block_tables.stride(0),
        out.stride(0), out.stride(1), BLOCK_SIZE=block_size, HAS_SOFTCAP=softcap is not None, HAS_PARTS=has_parts,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_stages=c.num_stages, **arguments,
    )  # fmt: skip
    if has_parts:
        _merge_parts[(num_tiles, num_kv_heads)](
            parts,
            states,
            of_heads,
            query_starts,
            seq_lens,
            out,
            num_tokens,
            num_sequences,
            out.stride(0),
            out.stride(1),
            **arguments,
        )


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    num_sequences: int,
) -> None:
    wrong = None
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != q.shape[2]:
        wrong = f"q {tuple(q.shape)}, keys {tuple(k_cache.shape)}, values {tuple(v_cache.shape)}"
    elif q.shape[1] % k_cache.shape[1]:
        wrong = f"{q.shape[1]} heads are no multiple of {k_cache.shape[1]} key heads"
    elif out.shape != q.shape or q.shape[2] > 256:
        wrong = f"q {tuple(q.shape)} and out {tuple(out.shape)}; equal shapes, heads of at most 256"
    elif query_starts.shape != (num_sequences + 1,) or block_tables.shape[0] != num_sequences:
        wrong = f"{num_sequences} lengths, {tuple(query_starts.shape)} starts, {tuple(block_tables.shape)} tables"
    elif len({t.dtype for t in (q, k_cache, v_cache, out)}) != 1:
        wrong = f"q, keys, values and out are {q.dtype}, {k_cache.dtype}, {v_cache.dtype}, {out.dtype}"
    elif any(t.numel() and t.stride(-1) != 1 for t in (q, k_cache, v_cache, out, block_tables)):
        wrong = "the last dimension of q, keys, values, out and tables must be contiguous"
    if wrong is not None:
        raise ValueError(f"attention operands do not fit: {wrong}")


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])  # or each new batch size would trigger a compilation
def _attend(
    q, k_cache, v_cache, query_starts, seq_lens, block_tables, out, parts, states, sinks, num_tokens, num_sequences,
    scale, softcap, q_row, q_head, k_block, k_head, k_key, v_block, v_head, v_key, table_row, out_row, out_head,
    BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_PARTS: tl.constexpr, PRECISION: tl.constexpr,
    IS_DECODE: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, FIXED_KEYS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles, key heads, NUM_PROGRAMS). Program z takes splits z, z + NUM_PROGRAMS, … of its sequence."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, tile = _tile(query_starts, num_sequences, IS_DECODE, BLOCK_ROWS // GROUP)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if tile * (BLOCK_ROWS // GROUP) >= num_queries:
        return
    row = tl.arange(0, BLOCK_ROWS)
    query = tile * (BLOCK_ROWS // GROUP) + row // GROUP
    live = (row < BLOCK_ROWS // GROUP * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_DIM)
    before = tl.load(seq_lens + sequence) - num_queries  # keys older than the first query of the chunk
    low, high, span, num_splits = _splits(
        before, tile, num_queries, BLOCK_ROWS // GROUP, BLOCK_KEYS, WINDOW, FIXED_KEYS, NUM_PROGRAMS
    )
    q_at = q + token[:, None] * q_row + head[:, None] * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None] & (d[None, :] < DIM), other=0.0)
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
            block = tl.load(table + key // BLOCK_SIZE, mask=key < high, other=0).to(tl.int64)
            offset = (key % BLOCK_SIZE).to(tl.int64)
            # Blocks below the window of every query of the tile may belong to another sequence by now.
            ours = key < high
            if WINDOW > 0:
                ours = ours & (key + WINDOW > before + tile * (BLOCK_ROWS // GROUP))
            k_at = k_cache + block * k_block + kv_head * k_head + offset * k_key
            k_tile = tl.load(k_at[None, :] + d[:, None], mask=ours[None, :] & (d[:, None] < DIM), other=0.0)
            scores = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale  # [BLOCK_ROWS, BLOCK_KEYS]
            if HAS_SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * LOG2_E)) + 1.0))
            seen = key[None, :] < visible[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] + WINDOW >= visible[:, None])
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            weight = weight * decay + tl.sum(p, axis=1)
            v_at = v_cache + block * v_block + kv_head * v_head + offset * v_key
            v_tile = tl.load(v_at[:, None] + d[None, :], mask=ours[:, None] & (d[None, :] < DIM), other=0.0)
            sums = tl.dot(p.to(v_tile.dtype), v_tile, sums * decay[:, None], input_precision=PRECISION)
            top = new_top
        if HAS_PARTS:
            at = (token + split * num_tokens) * NUM_HEADS + head
            tl.store(parts + at[:, None] * DIM + d[None, :], sums, mask=live[:, None] & (d[None, :] < DIM))
            tl.store(states + at * 2, top, mask=live)
            tl.store(states + at * 2 + 1, weight, mask=live)
        elif FIXED_KEYS > 0:
            all_sums, all_weight, all_top = _merge(all_sums, all_weight, all_top, sums, weight, top)
        else:
            all_sums, all_weight, all_top = sums, weight, top
    if not HAS_PARTS:
        _write(out, all_sums, all_weight, all_top, sinks, token, head, d, live, out_row, out_head, DIM, HAS_SINKS)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _merge_parts(
    parts, states, sinks, query_starts, seq_lens, out, num_tokens, num_sequences, out_row, out_head,
    IS_DECODE: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, FIXED_KEYS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The splits of `_attend`, merged in order. Grid: (query tiles, key heads)."""
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, tile = _tile(query_starts, num_sequences, IS_DECODE, BLOCK_ROWS // GROUP)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if tile * (BLOCK_ROWS // GROUP) >= num_queries:
        return
    row = tl.arange(0, BLOCK_ROWS)
    query = tile * (BLOCK_ROWS // GROUP) + row // GROUP
    live = (row < BLOCK_ROWS // GROUP * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_DIM)
    before = tl.load(seq_lens + sequence) - num_queries
    _, _, _, num_splits = _splits(
        before, tile, num_queries, BLOCK_ROWS // GROUP, BLOCK_KEYS, WINDOW, FIXED_KEYS, NUM_PROGRAMS
    )
    sums = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for split in range(0, num_splits):
        at = (token + split * num_tokens) * NUM_HEADS + head
        part = tl.load(parts + at[:, None] * DIM + d[None, :], mask=live[:, None] & (d[None, :] < DIM), other=0.0)
        part_top = tl.load(states + at * 2, mask=live, other=float("-inf"))
        part_weight = tl.load(states + at * 2 + 1, mask=live, other=0.0)
        sums, weight, top = _merge(sums, weight, top, part, part_weight, part_top)
    _write(out, sums, weight, top, sinks, token, head, d, live, out_row, out_head, DIM, HAS_SINKS)


@triton.jit
def _tile(query_starts, num_sequences, IS_DECODE: tl.constexpr, BLOCK_QUERIES: tl.constexpr):
    """(sequence, which tile of its queries): sequence b's tiles begin at query_starts[b] // BLOCK_QUERIES + b."""
    program = tl.program_id(0)
    sequence = program
    tile = program * 0
    if not IS_DECODE:
        low = program * 0
        high = low + num_sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_starts + middle) // BLOCK_QUERIES + middle <= program:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        tile = program - (tl.load(query_starts + sequence) // BLOCK_QUERIES + sequence)
    return sequence, tile


@triton.jit
def _splits(
    before, tile, num_queries, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    FIXED_KEYS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """(first key, end, keys per split, number of splits) that the queries of a tile see between them."""
    first_query = tile * BLOCK_QUERIES
    high = before + tl.minimum(first_query + BLOCK_QUERIES, num_queries)
    low = high * 0
    if WINDOW > 0:
        low = tl.maximum(before + first_query + 1 - WINDOW, 0)
    if FIXED_KEYS > 0:
        low = low // FIXED_KEYS * FIXED_KEYS
        span = high * 0 + FIXED_KEYS
    else:
        low = low // BLOCK_KEYS * BLOCK_KEYS
        span = tl.cdiv(tl.cdiv(high - low, NUM_PROGRAMS), BLOCK_KEYS) * BLOCK_KEYS
    return low, high, span, tl.cdiv(high - low, span)


@triton.jit
def _merge(sums, weight, top, more_sums, more_weight, more_top):
    """Merge two online softmaxes. Merging with one that has seen no key changes no bit."""
    new_top = tl.maximum(top, more_top)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay, more_decay = tl.exp2(top - finite_top), tl.exp2(more_top - finite_top)
    sums = sums * decay[:, None] + more_sums * more_decay[:, None]
    return sums, weight * decay + more_weight * more_decay, new_top


@triton.jit
def _write(
    out, sums, weight, top, sinks, token, head, d, live, out_row, out_head, DIM: tl.constexpr, HAS_SINKS: tl.constexpr
):
    """Sums divided by their weights; a sink is merged like a split that saw one key, whose value is zero."""
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        sums, weight, top = _merge(sums, weight, top, tl.zeros_like(sums), tl.zeros_like(weight) + 1.0, sink)
    result = sums / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at = out + token[:, None] * out_row + head[:, None] * out_head + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (d[None, :] < DIM))
