"""Norms, rotation, activations and the fixed-tile product on the GPU: equal to their formulas, poison stays poison."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.activation import triton as activations
from app.kernels.matmul import triton as matmul
from app.kernels.norms import triton as norms
from app.kernels.rotary import triton as rotary
from tests.kernels.cases import normal, rng
from tests.kernels.triton.tables import DEVICE, DTYPES, TOLERANCE, error, numpy, tensor

ROWS = (0, 1, 5)


def poisoned(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory and the part of it an operation writes."""
    memory = torch.full((num_rows + 1, width + 3), torch.nan, dtype=dtype, device=DEVICE)
    return memory, memory[:num_rows, :width]


def assert_poison_left(memory: torch.Tensor, num_rows: int, width: int) -> None:
    assert torch.isnan(memory[num_rows:]).all()
    assert torch.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(num_rows: int, with_residual: bool, dtype: torch.dtype) -> None:
    generator, width, eps = rng(), int(rng().integers(1, 80)), 1e-5
    x, residual = (tensor(normal(generator, num_rows, width), dtype) for _ in range(2))
    weight = tensor(normal(generator, width))
    memory, out = poisoned(num_rows, width, dtype)
    total = (x.float() + residual.float()).to(dtype)
    norms.rms_norm(x, weight, eps, out, residual if with_residual else None)
    values = numpy(total if with_residual else x)
    expected = numpy(weight) * values / np.sqrt((values**2).mean(axis=1, keepdims=True) + eps)
    assert error(out, expected) < TOLERANCE[dtype]
    assert_poison_left(memory, num_rows, width)
    if with_residual:
        assert torch.equal(residual, total)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated(num_rows: int, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_GATED_COLUMNS", 32)
    width = int(rng().integers(1, 80))
    gate_up = tensor(normal(rng(), num_rows, 2 * width) * 4, dtype)
    if num_rows:
        gate_up[0, 0] = -10_000.0  # exp(10,000) has no value
    memory, out = poisoned(num_rows, width, dtype)
    activations.gated(gate_up, out, activation)  # type: ignore[arg-type]
    gate, up = gate_up.double().chunk(2, dim=1)
    acted = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    # Relative to `up` at least: of gates far below zero there is next to nothing left.
    assert error(out, numpy(acted * up), numpy(up)) < TOLERANCE[dtype]
    assert_poison_left(memory, num_rows, width)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(4, 2, 16, 16), (9, 3, 24, 12), (2, 1, 8, 2)])
def test_rotate_and_write(num_rows: int, with_norm: bool, heads: int, kv_heads: int, dim: int, rotated: int) -> None:
    generator, block_size, num_blocks, eps = rng(), 16, 3, 1e-6
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    qkv = tensor(normal(generator, num_rows, (heads + 2 * kv_heads) * dim), dtype)
    angles = normal(generator, 40, rotated // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    positions = generator.integers(0, 40, num_rows).astype(np.int32)
    kv_slots = generator.permutation(num_blocks * block_size)[:num_rows].astype(np.int64)
    if num_rows > 1:
        kv_slots[1] = num_blocks * block_size  # padding
    norms = [tensor(normal(generator, dim)) for _ in range(2)] if with_norm else [None, None]
    caches = [
        torch.full((num_blocks, kv_heads, block_size, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)
    ]
    before = numpy(qkv).reshape(num_rows, heads + 2 * kv_heads, dim)
    rotary.rotate_and_write(
        qkv, tensor(positions), tensor(cos), tensor(sin), *caches, tensor(kv_slots), num_heads=heads,
        num_kv_heads=kv_heads, q_norm=norms[0], k_norm=norms[1], eps=eps,
    )  # fmt: skip

    expected = before.copy()
    for part, norm in zip((slice(0, heads), slice(heads, heads + kv_heads)), norms, strict=True):
        values = expected[:, part]
        if norm is not None:
            values = numpy(norm) * values / np.sqrt((values**2).mean(axis=2, keepdims=True) + eps)
        c, s = (table[positions].astype(np.float64)[:, None] for table in (cos, sin))
        first, second = values[..., : rotated // 2], values[..., rotated // 2 : rotated]
        rest = values[..., rotated:]
        expected[:, part] = np.concatenate([first * c - second * s, second * c + first * s, rest], axis=2)
    after = qkv.view(num_rows, heads + 2 * kv_heads, dim)
    assert error(after[:, :heads], expected[:, :heads]) < TOLERANCE[dtype]
    assert np.array_equal(numpy(after[:, heads:]), before[:, heads:])
    for cache, start in zip(caches, (heads, heads + kv_heads), strict=True):
        flat = cache.transpose(1, 2).reshape(num_blocks * block_size, kv_heads, dim)
        written = kv_slots < num_blocks * block_size
        found = flat[torch.from_numpy(kv_slots[written]).to(DEVICE)]
        assert error(found, expected[written, start : start + kv_heads]) < TOLERANCE[dtype]
        others = np.setdiff1d(np.arange(num_blocks * block_size), kv_slots)
        assert torch.isnan(flat[torch.from_numpy(others).to(DEVICE)]).all()


@pytest.mark.parametrize(("num_rows", "width", "depth"), [(0, 8, 8), (1, 1, 1), (3, 100, 70), (70, 130, 200)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(num_rows: int, width: int, depth: int, accumulate: bool, dtype: torch.dtype) -> None:
    generator = rng()
    x, weight = tensor(normal(generator, num_rows, depth), dtype), tensor(normal(generator, width, depth), dtype)
    bias = tensor(normal(generator, width), dtype) if generator.integers(2) else None
    memory, out = poisoned(num_rows, width, dtype if generator.integers(2) else torch.float32)
    parts = [numpy(x) @ numpy(weight).T]
    if bias is not None:
        parts.append(np.broadcast_to(numpy(bias), parts[0].shape))
    if accumulate:
        out.copy_(tensor(normal(generator, num_rows, width)))
        parts.append(numpy(out))
    matmul.linear(x, weight, out, bias, accumulate=accumulate)
    assert error(out, np.sum(parts, axis=0), *parts) < TOLERANCE[dtype]
    assert_poison_left(memory, num_rows, width)


@pytest.mark.usefixtures("rows_of_products_alike")
def test_a_row_of_a_product_has_the_same_bits_in_any_batch() -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    weight, x = tensor(normal(generator, 70, 130), dtype), tensor(normal(generator, 90, 130), dtype)
    whole, alone = torch.empty(90, 70, dtype=dtype, device=DEVICE), torch.empty(1, 70, dtype=dtype, device=DEVICE)
    matmul.linear(x, weight, whole)
    for row in generator.integers(0, 90, 6).tolist():
        matmul.linear(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], whole[row])
