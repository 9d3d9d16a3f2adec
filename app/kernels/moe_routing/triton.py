"""MoE routing on the GPU: each token's experts, pairs sorted by expert, and the weighted sum of experts' outputs.

Every grid follows from shapes, the host reads nothing and nothing is added by atomics: a step with experts is captured
like any other, and results are batch-invariant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.moe_routing.pairs import SortedPairs
from app.kernels.tuning import ceil_div, next_power_of_two

#: Pairs of one program while they are sorted, and tiles it lists at a time.
_CHUNK, _TILES = 64, 16
#: Columns of one program of the sum.
_COLUMNS = 1024


def route(
    logits: torch.Tensor,
    experts: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    normalised: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> None:
    """Write experts [T, K] int32 and topk_weights [T, K] float32 from logits [T, E]; see `reference`.

    NaN probabilities choose experts all the same, the lowest first. Raises ValueError for operands that do not fit.
    """
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    fits = experts.shape == topk_weights.shape == (num_tokens, top_k) and top_k <= num_experts
    if not fits or num_experts % num_groups or not (experts.is_contiguous() and topk_weights.is_contiguous()):
        raise ValueError(
            f"routing operands do not fit: logits {tuple(logits.shape)}, experts {tuple(experts.shape)}, topk_weights "
            f"{tuple(topk_weights.shape)}, {num_groups} groups; expected [T, E] and contiguous [T, K], K <= E"
        )
    if num_tokens == 0:
        return
    _route[(num_tokens,)](
        logits, experts, topk_weights, scale, logits.stride(0), NUM_EXPERTS=num_experts, TOP_K=top_k,
        NORMALISED=normalised, NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, BLOCK=next_power_of_two(num_experts),
        BLOCK_TOP=next_power_of_two(top_k), num_warps=1 if num_experts <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip


def block_rows(dtype: torch.dtype) -> int:
    """Rows of an expert's tile: one size per type, or a row's bits would depend on the batch."""
    return 64 if dtype.itemsize == 2 else 16


def sort_pairs(experts: torch.Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """experts: [T, K] contiguous int32, each below num_experts."""
    num_pairs, device = experts.numel(), experts.device
    most_busy = min(num_pairs, num_experts)
    num_tiles = most_busy + (num_pairs - most_busy) // block_rows
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    if num_pairs:
        num_chunks, block = ceil_div(num_pairs, _CHUNK), next_power_of_two(num_experts)
        counts = torch.empty((num_chunks, block), dtype=torch.int32, device=device)
        _count_pairs[(num_chunks,)](
            experts, counts, num_pairs, BLOCK=block, CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=True
        )  # fmt: skip
        _place_pairs[(num_chunks,)](
            experts, counts, order, tiles, num_pairs, num_chunks, num_tiles, BLOCK=block, CHUNK=_CHUNK, TILES=_TILES,
            BLOCK_ROWS=block_rows, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return SortedPairs(order, tiles, experts.shape[1], block_rows)


def combine(
    outputs: torch.Tensor,
    topk_weights: torch.Tensor,
    hidden: torch.Tensor,
    shared: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
) -> None:
    """hidden[t] += Σ_k topk_weights[t, k] * outputs[t * K + k] + logistic(gates[t]) * shared[t], in place, rounded
    once.

    outputs: [T * K, H]; topk_weights: [T, K] float32; hidden, shared: [T, H]; gates: [T, 1], or None for a factor of
    one. Raises ValueError for operands that do not fit.
    """
    (num_tokens, top_k), width = topk_weights.shape, hidden.shape[1]
    fits = outputs.shape == (num_tokens * top_k, width) and len(hidden) == num_tokens and topk_weights.is_contiguous()
    if not fits or (shared is not None and shared.shape != hidden.shape) or (gates is not None and shared is None):
        raise ValueError(
            f"outputs {tuple(outputs.shape)}, topk_weights {tuple(topk_weights.shape)} and hidden "
            f"{tuple(hidden.shape)} do not fit"
        )
    if num_tokens == 0:
        return
    _combine[(num_tokens, ceil_div(width, _COLUMNS))](
        outputs, topk_weights, hidden, hidden if shared is None else shared, hidden if gates is None else gates,
        outputs.stride(0), hidden.stride(0), 0 if shared is None else shared.stride(0),
        0 if gates is None else gates.stride(0), TOP_K=top_k, WIDTH=width, HAS_SHARED=shared is not None,
        HAS_GATES=gates is not None, BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _route(
    logits, experts, topk_weights, scale, logits_row, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """One token per program."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < NUM_EXPERTS
    values = tl.load(logits + t * logits_row + e, mask=inside, other=-float("inf")).to(tl.float32)
    powers = tl.where(inside, tl.exp(values - tl.max(values, axis=0)), 0.0)
    prob = powers / tl.sum(powers, axis=0)
    if TOP_GROUPS < NUM_GROUPS:
        group = e // (NUM_EXPERTS // NUM_GROUPS)
        best = tl.zeros((BLOCK,), tl.float32)  # of each expert's own group
        for g in tl.static_range(NUM_GROUPS):
            best = tl.where(group == g, tl.max(tl.where(group == g, prob, 0.0), axis=0), best)
        num_better = tl.zeros((BLOCK,), tl.int32)
        for g in tl.static_range(NUM_GROUPS):
            other = tl.max(tl.where(group == g, prob, 0.0), axis=0)
            num_better += ((other > best) | ((other == best) & (g < group))).to(tl.int32)
        prob = tl.where(num_better < TOP_GROUPS, prob, 0.0)
    # Numbers first, then NaN, and never a place beyond the last expert.
    left = tl.where(inside, tl.where(prob >= 0.0, prob, -1.0), -3.0)
    k = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros((BLOCK_TOP,), tl.int32)
    found = tl.zeros((BLOCK_TOP,), tl.float32)
    total = 0.0
    for n in tl.static_range(TOP_K):
        expert = tl.argmax(left, axis=0)  # ties to the lowest
        value = tl.sum(tl.where(e == expert, prob, 0.0), axis=0)
        left = tl.where(e == expert, -2.0, left)
        chosen = tl.where(k == n, expert, chosen)
        found = tl.where(k == n, value, found)
        total += value
    if NORMALISED:
        found = found / total
    tl.store(experts + t * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(topk_weights + t * TOP_K + k, found * scale, mask=k < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(experts, counts, num_pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """counts[c, e]: how many pairs of chunk c have expert e."""
    c = tl.program_id(0)
    i = c * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, BLOCK)
    expert = tl.load(experts + i, mask=i < num_pairs, other=BLOCK)
    is_of = expert[:, None] == e[None, :]
    tl.store(counts + c * BLOCK + e, tl.sum(is_of.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_tiles"])
def _place_pairs(
    experts, counts, order, tiles, num_pairs, num_chunks, num_tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Place a chunk's pairs: after all pairs of lower experts and the earlier ones of their own expert."""
    c = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_chunks, TILES):
        chunk = first + tl.arange(0, TILES)
        part = tl.load(counts + chunk[:, None] * BLOCK + e[None, :], mask=(chunk < num_chunks)[:, None], other=0)
        total += tl.sum(part, axis=0)
        before += tl.sum(tl.where((chunk < c)[:, None], part, 0), axis=0)
    starts = tl.cumsum(total, axis=0) - total
    j = tl.arange(0, CHUNK)
    i = c * CHUNK + j
    mine = i < num_pairs
    expert = tl.load(experts + i, mask=mine, other=BLOCK)
    is_of = expert[:, None] == e[None, :]
    in_front = tl.sum(((expert[:, None] == expert[None, :]) & (j[None, :] < j[:, None])).to(tl.int32), axis=1)
    place = tl.sum(tl.where(is_of, (starts + before)[None, :], 0), axis=1) + in_front
    tl.store(order + place, i, mask=mine)

    of_expert = (total + BLOCK_ROWS - 1) // BLOCK_ROWS  # tiles
    ends = tl.cumsum(of_expert, axis=0)
    for first in range(c * TILES, num_tiles, num_chunks * TILES):
        g = first + tl.arange(0, TILES)
        owner = tl.sum((ends[None, :] <= g[:, None]).to(tl.int32), axis=1)  # BLOCK: an unused tile
        owns = owner[:, None] == e[None, :]
        at = (g - tl.sum(tl.where(owns, (ends - of_expert)[None, :], 0), axis=1)) * BLOCK_ROWS
        count = tl.minimum(tl.sum(tl.where(owns, total[None, :], 0), axis=1) - at, BLOCK_ROWS)
        is_used = owner < BLOCK
        listed = g < num_tiles
        first_place = at + tl.sum(tl.where(owns, starts[None, :], 0), axis=1)
        tl.store(tiles + 3 * g, tl.where(is_used, first_place, 0), mask=listed)
        tl.store(tiles + 3 * g + 1, tl.where(is_used, count, 0), mask=listed)
        tl.store(tiles + 3 * g + 2, tl.where(is_used, owner, 0), mask=listed)


@triton.jit
def _combine(
    outputs, topk_weights, hidden, shared, gates, outputs_row, hidden_row, shared_row, gates_row, TOP_K: tl.constexpr,
    WIDTH: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T, tiles of columns)."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        at = outputs + (t * TOP_K + k) * outputs_row + columns
        total += tl.load(topk_weights + t * TOP_K + k) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHARED:
        factor = 1.0
        if HAS_GATES:
            gate = tl.load(gates + t * gates_row).to(tl.float32)
            small = tl.exp(-tl.abs(gate))  # of a negative number only, so that nothing overflows
            factor = tl.where(gate >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
        total += factor * tl.load(shared + t * shared_row + columns, mask=inside, other=0.0).to(tl.float32)
    at = hidden + t * hidden_row + columns
    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(hidden.dtype.element_ty), mask=inside)
