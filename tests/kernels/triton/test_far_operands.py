"""Index arithmetic is 64-bit: every operand of every GPU kernel may reach beyond 2**31 elements, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.kernels.activation import triton as activations
from app.kernels.matmul import triton as matmul
from app.kernels.norms import triton as norms
from app.kernels.paged_attention import reference
from app.kernels.paged_attention import triton as paged_attention
from app.kernels.rotary import triton as rotary
from tests.kernels.cases import normal
from tests.kernels.tensors import TOLERANCE, error, numpy, tensor
from tests.kernels.triton.far import FAR, behind, spread
from tests.kernels.triton.tables import random_tables
from tests.kernels.triton.test_lora import FORMS, slots_of
from tests.kernels.triton.test_moe_lora import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    INNER,
    MAX_RANK,
    SLOTS,
    addressed,
    chosen,
    form_of,
    sorted_pairs,
)
from tests.pairwise import pairwise
from tests.seeds import rng

DTYPE = torch.float16
DEPTH, BUCKET_SIZES = 40, (24, 16)
LORA_CASE = [(1, 0), (1, 1), (2, 2), (1, 3), (2, 5)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("operand", "dim"), [("x", 0), ("y", 0), ("memory", 0)])
def test_lora(form: str, operand: str, dim: int) -> None:
    generator = rng()
    tables = random_tables(generator, DEPTH, BUCKET_SIZES, DTYPE)
    slots = slots_of(LORA_CASE)
    given = {
        "x": tensor(normal(generator, len(slots), DEPTH), DTYPE),
        "y": tensor(normal(generator, len(slots), sum(BUCKET_SIZES)), DTYPE),
    }
    before, table_rows = given["y"].clone(), tables.rows
    if operand in given:
        given[operand] = spread(given[operand], dim)
    else:
        starts = {name: getattr(table_rows, name) + FAR for name in ("a_starts", "b_starts")}
        table_rows = table_rows._replace(memory=behind(table_rows.memory), **starts)
    FORMS[form](given["x"], given["y"], table_rows, LORA_CASE)
    assert error(given["y"], tables.expected(given["x"], before, slots)) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("operand", ["x", "out"])
def test_experts(operand: str) -> None:
    """Beside the same operands laid out densely, which are compared with the definition elsewhere."""
    generator, num_tokens, form = rng(), 6, form_of("triton")
    given = addressed(generator, HIDDEN, (INNER, INNER), DTYPE)
    slots = tensor(generator.integers(0, SLOTS, num_tokens).astype(np.int32))
    pairs = sorted_pairs(form, chosen(generator, num_tokens), DTYPE)
    weight = tensor(normal(generator, EXPERTS, 2 * INNER, HIDDEN), DTYPE)
    x, topk_weights = (
        tensor(normal(generator, num_tokens, HIDDEN), DTYPE),
        tensor(normal(generator, num_tokens, CHOICES)),
    )

    def computed(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        form.lora.expert_linear(x, weight, out, pairs, x_divisor=CHOICES)
        form.lora.add_lora(x, out, given.rows, slots, pairs, max_rank=MAX_RANK, x_divisor=CHOICES)
        hidden = torch.zeros(num_tokens, 2 * INNER, dtype=DTYPE, device=x.device)
        form.routing.combine(out, topk_weights, hidden)
        return out, hidden

    out = torch.zeros(num_tokens * CHOICES, 2 * INNER, dtype=DTYPE, device=x.device)
    expected = computed(x, out)
    found = computed(spread(x, 0) if operand == "x" else x, spread(out, 0) if operand == "out" else out.clone())
    for one, other in zip(found, expected, strict=True):
        assert error(one, numpy(other)) < TOLERANCE[DTYPE]


@pairwise(
    {
        "batch_invariant": [False, True],
        "counts": [[1, 1, 1], [3, 1, 5]],
        "operand, dim": [
            ("q", 0),
            ("q", 1),
            ("out", 0),
            ("out", 1),
            ("tables", 0),
            *((n, d) for n in ("keys", "values") for d in range(3)),
        ],
    }
)
def test_attention(
    operand: str, dim: int, counts: list[int], batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_SPLIT_KEYS", 64)
    generator, dim_head, block_size = rng(), 16, 16
    lens, starts = np.array([70, 9, 40], np.int32), np.cumsum([0, *counts]).astype(np.int32)
    blocks = generator.permutation(15).reshape(3, 5).astype(np.int32)
    operands = {
        "q": tensor(normal(generator, sum(counts), 4, dim_head), DTYPE),
        "keys": tensor(normal(generator, 15, 2, block_size, dim_head), DTYPE),
        "values": tensor(normal(generator, 15, 2, block_size, dim_head), DTYPE),
        "tables": tensor(blocks),
        "out": torch.full_like(tensor(normal(generator, sum(counts), 4, dim_head), DTYPE), torch.nan),
    }
    expected = reference.paged_attention(
        *(numpy(operands[name]) for name in ("q", "keys", "values")), starts, lens, blocks, dim_head**-0.5
    )
    operands[operand] = spread(operands[operand], dim)
    paged_attention.paged_attention(
        operands["q"], operands["keys"], operands["values"], tensor(starts), tensor(lens), operands["tables"],
        operands["out"], scale=dim_head**-0.5, max_query_len=max(counts), max_seq_len=70,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    assert error(operands["out"], expected) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("operand", ["x", "weight", "out"])
def test_linear(operand: str) -> None:
    x, weight = (tensor(normal(rng(), size, 40), DTYPE) for size in (5, 70))
    given = {"x": x, "weight": weight, "out": torch.full((5, 70), torch.nan, dtype=DTYPE, device=x.device)}
    given[operand] = spread(given[operand], 0)
    matmul.linear(given["x"], given["weight"], given["out"])
    assert error(given["out"], numpy(x) @ numpy(weight).T) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("operand", ["x", "out", "residual"])
def test_rms_norm(operand: str) -> None:
    given = {name: tensor(normal(rng(), 3, 20), DTYPE) for name in ("x", "residual", "out")}
    total, weight = (given["x"].float() + given["residual"].float()).to(DTYPE), tensor(normal(rng(), 20))
    given[operand] = spread(given[operand], 0)
    norms.rms_norm(given["x"], weight, 1e-5, given["out"], given["residual"])
    values = numpy(total)
    expected = numpy(weight) * values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-5)
    assert error(given["out"], expected) < TOLERANCE[DTYPE]
    assert torch.equal(given["residual"], total)


@pytest.mark.parametrize("operand", ["gate_up", "out"])
def test_gated(operand: str) -> None:
    given = {"gate_up": tensor(normal(rng(), 3, 40), DTYPE), "out": tensor(normal(rng(), 3, 20), DTYPE)}
    gate, up = given["gate_up"].double().chunk(2, dim=1)
    given[operand] = spread(given[operand], 0)
    activations.gated_activation(given["gate_up"], given["out"], "silu")
    assert error(given["out"], numpy(torch.nn.functional.silu(gate) * up)) < TOLERANCE[DTYPE]


@pairwise(
    {
        "with_norm": [False, True],
        "operand, dim": [
            ("qkv", 0),
            ("cos", 0),
            ("sin", 0),
            *((name, d) for name in ("k_cache", "v_cache") for d in range(3)),
        ],
    },
    strength=1,
)
def test_rotate_and_write(operand: str, dim: int, with_norm: bool) -> None:
    """Beside the same operands laid out densely, which are compared with the formula elsewhere."""
    generator, heads, kv_heads, dim_head = rng(), 4, 3, 16
    dense = {
        "qkv": tensor(normal(generator, 4, (heads + 2 * kv_heads) * dim_head), DTYPE),
        "cos": tensor(normal(generator, 20, dim_head // 2)),
        "sin": tensor(normal(generator, 20, dim_head // 2)),
        "k_cache": torch.full((3, kv_heads, 16, dim_head), torch.nan, dtype=DTYPE, device=tensor(np.zeros(1)).device),
    }
    dense["v_cache"] = dense["k_cache"].clone()
    positions, places = tensor(np.array([0, 7, 19, 3], np.int32)), tensor(np.array([47, 0, 20, 31]))
    norm = tensor(normal(generator, dim_head)) if with_norm else None
    further: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": 1e-6}
    given = {name: spread(t, dim) if name == operand else t.clone() for name, t in dense.items()}
    for of in (dense, given):
        rotary.rotate_and_write(
            of["qkv"], positions, of["cos"], of["sin"], of["k_cache"], of["v_cache"], places, q_norm=norm, k_norm=norm,
            **further,
        )  # fmt: skip
    for name in ("qkv", "k_cache", "v_cache"):
        assert torch.equal(given[name].nan_to_num(9.0), dense[name].nan_to_num(9.0)), name
