"""The XLA forms' own modules, embeddings, heads and norms are the definition's, on the rows of their segments only."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.dora.reference import dora_scale
from app.kernels.extras import reference, xla
from app.kernels.extras.cpu import Q_NORM
from app.kernels.extras.xla import OwnSegments, OwnTables
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.seeds import rng

LAYER, SLOT, NUM_SLOTS = 1, 2, 4
RUNS = ([], [(0, 1, SLOT)], [(1, 2, SLOT), (4, 15, SLOT), (15, 17, 1)])  # slot 1 has nothing


class Memory:
    """Arrays one after the other between values that must not be read, and tables of where they lie."""

    def __init__(self) -> None:
        self._parts = [np.zeros(1, np.float32)]
        self.modules = np.zeros((2, NUM_SLOTS, 7, 3), np.int32)
        self.norms = np.zeros((2, NUM_SLOTS, 4), np.int32)
        self.slots = np.zeros((NUM_SLOTS, xla.NUM_PLACES + 3), np.int32)

    def put(self, array: NDArray[Any]) -> int:
        place = sum(part.size for part in self._parts)
        self._parts += [array.astype(np.float32).reshape(-1), np.full(5, np.nan, np.float32)]
        return place

    def tables(self, beyond: int) -> OwnTables:
        memory = np.concatenate([*self._parts, np.full(beyond, np.nan, np.float32)])
        return OwnTables(*(jnp.asarray(array) for array in (memory, self.modules, self.norms, self.slots)))


def _segments(runs: list[tuple[int, int, int]], num_rows: int) -> OwnSegments:
    lines = np.full((3, num_rows), -1, np.int32)
    count = xla.own_segments(np.array(runs, np.int64).reshape(-1, 3), lines)
    return OwnSegments(jnp.int32(count), *(jnp.asarray(line) for line in lines))


def _mine(runs: list[tuple[int, int, int]]) -> list[int]:
    return [row for first, end, slot in runs if slot == SLOT for row in range(first, end)]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("parts", ["scale", "shift", "scale shift", "weight", "weight shift", "weight scale shift"])
def test_modules_are_the_definitions_in_their_rows_only(runs: list[tuple[int, int, int]], parts: str) -> None:
    """The middle one of three side by side, wider than one piece of its outputs."""
    generator = rng()
    num_rows, d_in, sizes, modules, low = 17 if runs else 1, 24, (5, 150, 3), (3, 5, 6), 5
    x, y = normal(generator, num_rows, d_in), normal(generator, num_rows, sum(sizes))
    arrays = {"weight": normal(generator, 150, d_in), "scale": normal(generator, 150), "shift": normal(generator, 150)}
    memory = Memory()
    for kind, name in ((xla.WEIGHT, "weight"), (xla.SCALE, "scale"), (xla.SHIFT, "shift")):
        if name in parts:
            memory.modules[LAYER, SLOT, 5, kind] = memory.put(arrays[name])
    own = memory.tables(xla.read_beyond(d_in, 0, 150))
    place = own, jnp.int32(LAYER), modules, sizes, _segments(runs, num_rows)
    out = np.asarray(xla.own_modules(jnp.asarray(x), jnp.asarray(y), *place))
    expected = y.astype(np.float64)
    for t in _mine(runs):
        given = [arrays[name] if name in parts else None for name in ("weight", "scale", "shift")]
        expected[t, low : low + 150] = reference.module(y[t, low : low + 150], x[t], *given)
    assert relative_error(out, expected) < TOLERANCE["float32"]
    np.testing.assert_array_equal(out[:, :low], y[:, :low])
    np.testing.assert_array_equal(out[:, low + 150 :], y[:, low + 150 :])
    others = [t for t in range(num_rows) if t not in _mine(runs)]
    np.testing.assert_array_equal(out[others], y[others])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize(
    ("num_ids", "rank", "first_column"), [(0, 0, 0), (1, 8, 0), (0, 1, 0), (40, 13, 0), (77, 0, 30)]
)
def test_a_head_is_the_definitions_in_its_rows_only(
    runs: list[tuple[int, int, int]], with_weight: bool, num_ids: int, rank: int, first_column: int
) -> None:
    """Token ids may be in any order, and other shards'."""
    generator = rng()
    num_rows, hidden, vocab = 17 if runs else 1, 24, 40 + 37
    width = vocab - first_column - 9 if first_column else vocab
    x, logits = normal(generator, num_rows, hidden), normal(generator, num_rows, width)
    weight, rows = normal(generator, width, hidden), normal(generator, num_ids, hidden)
    a, b = normal(generator, rank, hidden), normal(generator, rank, width)
    ids = generator.permutation(vocab)[:num_ids]
    memory = Memory()
    slot = memory.slots[SLOT]
    slot[[xla.NUM_HEAD_IDS, xla.HEAD_RANK]] = num_ids, rank
    if with_weight:
        slot[xla.HEAD_WEIGHT] = memory.put(weight)
    for column, array in ((xla.HEAD_ROWS, rows), (xla.HEAD_IDS, ids), (xla.HEAD_A, a), (xla.HEAD_B, b)):
        slot[column] = memory.put(array)
    own = memory.tables(xla.read_beyond(hidden, vocab, hidden))
    found = np.asarray(
        xla.own_logits(jnp.asarray(x), jnp.asarray(logits), own, first_column, _segments(runs, num_rows))
    )
    expected = logits.astype(np.float64)
    is_mine = (ids >= first_column) & (ids < first_column + width)
    for p in _mine(runs):
        head = weight if with_weight else None
        columns = (ids[is_mine] - first_column).tolist()
        expected[p] = reference.logits(logits[p], x[p], head, columns, rows[is_mine], a, b)
    assert relative_error(found, expected) < TOLERANCE["float32"]
    others = [p for p in range(num_rows) if p not in _mine(runs)]
    np.testing.assert_array_equal(found[others], logits[others])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("rank", [0, 1, 8, 13])
def test_an_embedding_takes_own_rows_and_a_delta(runs: list[tuple[int, int, int]], rank: int) -> None:
    generator = rng()
    num_rows, hidden, vocab = 17 if runs else 1, 24, 31
    token_ids = generator.integers(0, vocab, num_rows).astype(np.int32)
    rows, own_rows = normal(generator, num_rows, hidden), normal(generator, vocab, hidden)
    a, b = normal(generator, rank, vocab), normal(generator, rank, hidden)
    has_row = generator.integers(0, 2, num_rows).astype(bool)
    memory = Memory()
    place, slot = memory.put(own_rows), memory.slots[SLOT]
    slot[[xla.EMBED_A, xla.EMBED_B, xla.EMBED_RANK]] = memory.put(a.T), memory.put(b), rank
    places = np.where(has_row, place + token_ids * hidden, 0).astype(np.int32)
    places[[t for t in range(num_rows) if t not in _mine(runs)]] = 0
    own = memory.tables(xla.read_beyond(hidden, vocab, hidden))
    out = np.asarray(
        xla.own_embedding(
            jnp.asarray(rows), jnp.asarray(token_ids), jnp.asarray(places), own, _segments(runs, num_rows)
        )
    )
    expected = rows.astype(np.float64)
    for t in _mine(runs):
        row = own_rows[token_ids[t]] if has_row[t] else rows[t]
        expected[t] = row.astype(np.float64) + b.T.astype(np.float64) @ a[:, token_ids[t]].astype(np.float64)
    assert relative_error(out, expected) < TOLERANCE["float32"]
    others = [t for t in range(num_rows) if t not in _mine(runs)]
    np.testing.assert_array_equal(out[others], rows[others])


@pytest.mark.parametrize("runs", RUNS)
def test_a_norm_takes_the_own_weight_in_its_rows_only(runs: list[tuple[int, int, int]]) -> None:
    generator = rng()
    num_rows, heads, dim = 17 if runs else 1, 3, 8
    x, base, weight = normal(generator, num_rows, heads, dim), normal(generator, dim), normal(generator, dim)
    memory = Memory()
    memory.norms[LAYER, SLOT, Q_NORM] = memory.put(weight)
    own = memory.tables(xla.read_beyond(dim, 0, dim))
    out = np.asarray(
        xla.own_norm(
            jnp.asarray(x), jnp.asarray(x * base), jnp.asarray(base), own.memory, own.norms[LAYER, :, Q_NORM],
            _segments(runs, num_rows), lambda rows, own_weight: rows * own_weight,
        )
    )  # fmt: skip
    expected = x * base
    expected[_mine(runs)] = x[_mine(runs)] * weight
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rank", [1, 8, 21])
def test_squared_norms_are_those_of_doras_scale(rank: int) -> None:
    generator = rng()
    d_in, sizes, num_rows = 24, (37, 5), 48
    weight = normal(generator, 2, sum(sizes), d_in)
    a, b = np.zeros((2, num_rows, 2 * d_in), np.float32), np.zeros((2, num_rows, sum(sizes)), np.float32)
    rows = slice(16, 16 + rank)
    a[:, rows], b[:, rows] = normal(generator, 2, rank, 2 * d_in), normal(generator, 2, rank, sum(sizes))
    a[:, :16], b[:, :16] = np.nan, np.nan  # another adapter's
    weight[LAYER, 3] = 0
    b[LAYER, :, 3] = 0
    numbers = (jnp.int32(number) for number in (LAYER, 16, -(-rank // 8)))
    squares = np.asarray(xla.squared_norms(*(jnp.asarray(array) for array in (weight, a, b)), *numbers, sizes))
    assert squares[3] == 0
    for module, part in enumerate((slice(0, 37), slice(37, 42))):
        own_a, own_b = a[LAYER, rows, module * d_in : (module + 1) * d_in], b[LAYER, rows, part]
        magnitude = normal(generator, own_b.shape[1])
        expected = dora_scale(magnitude, weight[LAYER, part], own_a, own_b)
        norms = np.sqrt(squares[part])
        found = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
        assert relative_error(found, expected.astype(np.float64)) < TOLERANCE["float32"]
