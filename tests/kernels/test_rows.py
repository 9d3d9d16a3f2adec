"""Norms, rotary embedding, activations and draws, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from app.kernels.activation.cpu import activate
from app.kernels.machine.scalars import exp_float32
from app.kernels.machine.team import Team
from app.kernels.norms.cpu import rms_norm
from app.kernels.rotary.cpu import rotate_and_store
from app.kernels.sampling import cpu as sampling
from tests.kernels.cases import normal, relative_error, rng


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([rng().uniform(-87, 88, 20000), [0.0, -0.0, 1.0, -1.0]]).astype(np.float32)
    out = np.array([exp_float32(v) for v in x])
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


@pytest.mark.parametrize("width", [1, 7, 8, 40, 576])
def test_rms_norm(width: int) -> None:
    generator = rng()
    x, weight = normal(generator, 5, width), normal(generator, width)
    out = np.full_like(x, np.nan)
    Team(2).run(rms_norm, 1, x, weight, np.float32(1e-5), out)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    assert relative_error(out, exact) < 1e-6


@pytest.mark.parametrize("kernel", ["silu", "gelu"])
def test_gated_activations(kernel: str) -> None:
    gate_up = normal(rng(), 6, 2 * 48) * 4
    out = np.full((6, 37), np.nan, np.float32)
    for first, end in ((0, 16), (16, 37)):
        activate(gate_up, 48, kernel == "gelu", first, end, out)
    gate, up = gate_up[:, :37].astype(np.float64), gate_up[:, 48:85]
    if kernel == "silu":
        exact = gate / (1 + np.exp(-gate)) * up
    else:
        exact = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    assert relative_error(out, exact) < 1e-6


def test_rotation_writes_every_key_and_value_to_its_place_and_nowhere_else() -> None:
    generator = rng()
    heads, kv_heads, dim, block_size, count = 4, 2, 24, 16, 7
    q_size, kv_size = 96, 48
    qkv = normal(generator, count, q_size + 2 * kv_size)
    before = qkv.astype(np.float64)
    positions = generator.integers(0, 60, count).astype(np.int32)
    kv_slots = generator.permutation(5 * block_size)[:count].astype(np.int64)
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k_memory = np.zeros((5, kv_heads, 32, block_size), np.float32)
    v_memory = np.zeros((5, kv_heads, block_size, 32), np.float32)
    none = np.empty(0, np.float32)
    Team(2).run(
        rotate_and_store, 1, qkv, positions, kv_slots, cos, sin, none, none, np.float32(0), k_memory, v_memory,
        heads, kv_heads, dim, q_size, kv_size,
    )  # fmt: skip

    def rotated(x: np.ndarray) -> np.ndarray:
        c, s = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    q = rotated(before[:, :q_size].reshape(count, heads, dim))
    k = rotated(before[:, q_size : q_size + kv_size].reshape(count, kv_heads, dim))
    v = before[:, q_size + kv_size :].reshape(count, kv_heads, dim)
    assert relative_error(qkv[:, :q_size], q.reshape(count, -1)) < 1e-6
    for t, kv_slot in enumerate(kv_slots):
        block, offset = divmod(int(kv_slot), block_size)
        assert relative_error(k_memory[block, :, :dim, offset], k[t]) < 1e-6
        assert np.array_equal(v_memory[block, :, offset, :dim], v[t].astype(np.float32))
    assert np.count_nonzero(v_memory) == count * kv_heads * dim


def _draw(row: np.ndarray, seed: int, position: int = 3, **settings: float) -> int:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    return int(
        sampling.draw(
            row,
            np.float32(values["temperature"]),
            np.int32(values["top_k"]),
            np.float32(values["top_p"]),
            np.float32(values["min_p"]),
            np.uint64(seed),
            np.int64(position),
        )
    )


def test_draws_follow_the_distribution_and_depend_on_seed_and_position_only() -> None:
    row = rng().uniform(-2, 2, 12).astype(np.float32)  # each of them is expected some ten times or more
    p = np.exp(row.astype(np.float64) / 0.7)
    p /= p.sum()
    drawn = np.array([_draw(row, seed, temperature=0.7) for seed in range(20000)])
    counts = np.bincount(drawn, minlength=12)
    chi_squared = ((counts - 20000 * p) ** 2 / (20000 * p)).sum()
    assert chi_squared < 45  # 11 degrees of freedom: p < 1e-5
    assert _draw(row, 7) == _draw(row, 7)
    assert len({_draw(row, 7, position) for position in range(200)}) > 1


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, {5, 4, 3}),
        ({"top_p": 0.5}, {5}),
        ({"top_p": 0.8}, {5, 4}),
        ({"min_p": 0.3}, {5, 4}),
        ({"top_k": 2, "top_p": 0.99}, {5, 4}),
    ],
)
def test_filters_keep_exactly_the_right_tokens(settings: dict[str, float], kept: set[int]) -> None:
    p = np.array([0.01, 0.02, 0.03, 0.12, 0.22, 0.60])
    row = np.log(p).astype(np.float32)
    assert {_draw(row, seed, **settings) for seed in range(3000)} == kept


def test_top_p_equals_a_full_sort_on_flat_and_peaked_rows() -> None:
    generator = rng()
    for scale in (0.01, 1.0, 6.0):
        row = normal(generator, 700) * np.float32(scale)
        p = np.exp(row.astype(np.float64) - row.max())
        for top_p in (0.1, 0.5, 0.9, 0.999):
            ordered = np.sort(p)[::-1]
            size = int(np.searchsorted(np.cumsum(ordered), top_p * ordered.sum())) + 1
            drawn = {_draw(row, seed, top_p=top_p) for seed in range(300)}
            assert drawn <= set(np.argsort(-p, kind="stable")[: size + 1].tolist())
