"""Launches of every GPU kernel with the operands of real models, for compiling only: memory is never touched.

In: nothing. Out: named functions that call the kernels' Python side once. Shapes are those of Llama 3 8B (hidden 4096,
32 heads on 8 of 128, inner 14336) while decoding, in a prefill, and in deterministic mode; experts are Qwen3-30B-A3B's
(hidden 2048, 128 of 768, 8 per token), latents DeepSeek-V2-Lite's (16 heads, 512 and 64 wide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from app.kernels.activation import triton as activations
from app.kernels.bgmv import triton as bgmv
from app.kernels.lora_rows import ExpertRows, RankRows
from app.kernels.matmul import triton as matmul
from app.kernels.mla_attention import triton as latent_attention
from app.kernels.moe_lora import triton as moe_lora
from app.kernels.moe_routing import triton as moe_routing
from app.kernels.norms import triton as norms
from app.kernels.paged_attention import triton as paged_attention
from app.kernels.rotary import triton as rotary
from app.kernels.sgmv import triton as sgmv

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
QKV = (HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM)
BF16 = torch.bfloat16

Launch = Callable[[], None]


def launches() -> Iterator[tuple[str, Launch]]:
    """(name, call), in bfloat16."""
    yield "bgmv, decode", partial(_bgmv, 64, QKV)
    yield "sgmv, decode", partial(_sgmv, 64, (INNER, INNER), batch_invariant=True)
    yield "sgmv, prefill", partial(_sgmv, 2048, QKV)
    yield "attention, decode", partial(_attention, 16, 1)
    yield "attention, deterministic", partial(_attention, 4, 1, batch_invariant=True, has_sinks=True)
    yield "attention, prefill", partial(_attention, 2, 512, window=1024, softcap=30.0, has_sinks=True)
    yield "latents, decode", partial(_latents, 4, 1, batch_invariant=True)
    yield "latents, prefill", partial(_latents, 2, 512)
    yield "latents, deterministic prefill", partial(_latents, 2, 512, batch_invariant=True)
    yield "rows", _rows
    yield "matmul", _matmul
    yield "experts", partial(_experts, 16)


def _tables(widths: tuple[int, ...]) -> RankRows:
    starts = torch.empty(9, len(widths), dtype=torch.int64)
    return RankRows(torch.empty(1 << 20, dtype=BF16), starts, starts, starts.int(), HIDDEN, widths)


def _bgmv(num_rows: int, widths: tuple[int, ...]) -> None:
    x, y = torch.empty(num_rows, HIDDEN, dtype=BF16), torch.empty(num_rows, sum(widths), dtype=BF16)
    bgmv.add_lora(x, y, _tables(widths), torch.empty(num_rows, dtype=torch.int32), max_rank=64)


def _sgmv(num_rows: int, widths: tuple[int, ...], *, batch_invariant: bool = False) -> None:
    x, y = torch.empty(num_rows, HIDDEN, dtype=BF16), torch.empty(num_rows, sum(widths), dtype=BF16)
    sgmv.add_lora(
        x, y, _tables(widths), torch.empty(48, 3, dtype=torch.int32), max_rank=64,
        block_tokens=sgmv.block_tokens(num_rows, batch_invariant=batch_invariant), batch_invariant=batch_invariant,
    )  # fmt: skip


def _attention(
    num_sequences: int,
    num_queries: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    has_sinks: bool = False,
) -> None:
    q = torch.empty(num_sequences * num_queries, HEADS, DIM, dtype=BF16)
    cache = torch.empty(8, KV_HEADS, BLOCK_SIZE, DIM, dtype=BF16)
    integers = partial(torch.empty, dtype=torch.int32)
    paged_attention.paged_attention(
        q, cache, cache, integers(num_sequences + 1), integers(num_sequences), integers(num_sequences, 512), q,
        scale=0.1, max_query_len=num_queries, max_seq_len=8192, window=window, softcap=softcap,
        sinks=torch.empty(HEADS) if has_sinks else None, batch_invariant=batch_invariant,
    )  # fmt: skip


def _latents(num_sequences: int, num_queries: int, *, batch_invariant: bool = False) -> None:
    heads, own, rank, turned = 16, 128, 512, 64
    num_tokens, integers = num_sequences * num_queries, partial(torch.empty, dtype=torch.int32)
    queries, rows = (torch.empty(num_tokens, width, dtype=BF16) for width in (heads * (own + turned), rank + turned))
    memory, angles = torch.empty(8, 1, BLOCK_SIZE, rank + turned, dtype=BF16), torch.empty(8192, turned // 2)
    places = torch.empty(num_tokens, dtype=torch.int64)
    latent_attention.rotate_and_store(queries, rows, places.int(), angles, angles, memory, places, num_heads=heads)
    absorbed = torch.empty(num_tokens, heads, rank, dtype=BF16)
    rotated = queries.view(num_tokens, heads, -1)[:, :, own:]
    latent_attention.latent_attention(
        absorbed, rotated, memory, integers(num_sequences + 1), integers(num_sequences), integers(num_sequences, 512),
        absorbed.clone(), scale=0.1, max_query_len=num_queries, max_seq_len=8192, batch_invariant=batch_invariant,
    )  # fmt: skip


def _rows() -> None:
    x = torch.empty(64, HIDDEN, dtype=BF16)
    norms.rms_norm(x, torch.empty(HIDDEN), 1e-5, x, x)
    gate_up, gated = torch.empty(64, 2 * INNER, dtype=BF16), torch.empty(64, INNER, dtype=BF16)
    activations.gated_activation(gate_up, gated, "silu")
    activations.gated_activation(gate_up, gated, "silu", 7.0, 1.702)
    cache, angles = torch.empty(8, KV_HEADS, BLOCK_SIZE, DIM, dtype=BF16), torch.empty(8192, DIM // 2)
    places = torch.empty(64, dtype=torch.int64)
    norm = torch.empty(DIM)
    rotary.rotate_and_write(
        torch.empty(64, sum(QKV), dtype=BF16), places.int(), angles, angles, cache, cache, places, num_heads=HEADS,
        num_kv_heads=KV_HEADS, q_norm=norm, k_norm=norm, eps=1e-6,
    )  # fmt: skip


def _matmul() -> None:
    x, weight = torch.empty(64, HIDDEN, dtype=BF16), torch.empty(sum(QKV), HIDDEN, dtype=BF16)
    matmul.linear(x, weight, torch.empty(64, sum(QKV), dtype=BF16), weight[:, 0].contiguous(), accumulate=True)


def _experts(num_tokens: int) -> None:
    """A layer's products in order; gate and up are read at the token's row, down at the pair's."""
    hidden, inner, num_experts, top_k = 2048, 768, 128, 8
    logits, topk_weights = torch.empty(num_tokens, num_experts, dtype=BF16), torch.empty(num_tokens, top_k)
    experts, slots = torch.empty(num_tokens, top_k, dtype=torch.int32), torch.empty(num_tokens, dtype=torch.int32)
    moe_routing.route(logits, experts, topk_weights, normalised=True)
    pairs = moe_routing.sort_pairs(experts, num_experts, moe_routing.block_rows(BF16))
    x, gated = torch.empty(num_tokens, hidden, dtype=BF16), torch.empty(num_tokens * top_k, inner, dtype=BF16)
    for given, width, modules, divisor in ((x, inner, 2, top_k), (gated, hidden, 1, 1)):
        out = torch.empty(num_tokens * top_k, modules * width, dtype=BF16)
        weight = torch.empty(num_experts, modules * width, given.shape[1], dtype=BF16)
        moe_lora.expert_linear(given, weight, out, pairs, x_divisor=divisor)
        at = torch.empty(9, num_experts, modules, dtype=torch.int64)
        rows = ExpertRows(at, at, at.int(), given.shape[1], width)
        moe_lora.add_lora(given, out, rows, slots, pairs, max_rank=64, x_divisor=divisor)
    moe_routing.combine(out, topk_weights, x, x, logits[:, :1])
