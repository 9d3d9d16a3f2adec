"""8-bit weights at their corners: groups that are not full, columns that are not there, zeros, far ends, one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.bf16_matmul import cpu as bf16_matmul
from app.kernels.bf16_matmul.reference import to_bfloat16
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul import cpu, int8, pack_weights, reference
from app.kernels.matmul.int8 import GROUP
from tests.kernels.cases import normal, relative_error
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]


def multiplied(x: Floats, w: Any, num_columns: int, threads: int = 2) -> Floats:
    """x @ w into NaN memory that is as wide as the panels, without what lies behind the columns."""
    panels = -(-num_columns // cpu.PANEL)
    out, team = np.full((len(x), panels * cpu.PANEL), np.nan, np.float32), ThreadTeam(threads)
    team.run(int8.multiply, 1, x, w, out)
    team.close()
    assert not out[:, num_columns:].any(), "columns that are not there are zero"
    return out[:, :num_columns]


def read_back(w: int8.Int8Panels, num_columns: int) -> Floats:
    """[N, K] of the panels that a product uses."""
    panels = pack_weights.dequantise(w)
    return np.ascontiguousarray(panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:num_columns])


@pairwise({"num_columns": [1, 15, 16, 17, 70], "depth": [1, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 7]}, strength=1)
def test_products_are_those_of_the_weights_that_are_read_back(num_columns: int, depth: int) -> None:
    generator = rng()
    w = normal(generator, num_columns, depth)
    stored = pack_weights.quantise(w)
    back = read_back(stored, num_columns)
    assert np.abs(back - w).max() <= np.ptp(w) / 255 * 0.501 + 1e-6
    for num_rows in (0, 1, 3, 9):
        x = normal(generator, num_rows, depth)
        found = multiplied(x, stored, num_columns)
        assert relative_error(found, reference.matmul(x, back), reference.matmul(np.abs(x), np.abs(back))) < 2e-6
        np.testing.assert_array_equal(found, multiplied(x, cpu.pack(back), num_columns, threads=3))


def test_a_product_of_other_weights_would_be_seen() -> None:
    """Of the weights before they were rounded, and of the next level up in one place."""
    generator = rng()
    w, x = normal(generator, 20, 70), np.abs(normal(generator, 4, 70)) + 1
    stored = pack_weights.quantise(w)
    found, back = multiplied(x, stored, 20), read_back(stored, 20)
    assert relative_error(found, reference.matmul(x, w)) > 2e-6
    back[7, 33] += stored.scales[0, 1, 7]
    wrong = reference.matmul(x, back)
    assert (np.abs(found - wrong).max(axis=0) > 1e-4 * np.abs(wrong).max()).nonzero()[0].tolist() == [7]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1e-30, 1e30])
def test_equal_weights_are_exact_whatever_they_are(value: float) -> None:
    w = np.full((17, GROUP + 5), value, np.float32)
    stored = pack_weights.quantise(w)
    np.testing.assert_array_equal(read_back(stored, 17), w)
    x = normal(rng(), 2, GROUP + 5)
    np.testing.assert_allclose(
        multiplied(x, stored, 17), reference.matmul(x, w), rtol=1e-5, atol=abs(value) * 1e-5
    )  # fmt: skip


def test_groups_of_one_column_have_nothing_to_do_with_each_other() -> None:
    """Sizes a thousand times apart: the small group keeps its own steps."""
    w = normal(rng(), 16, 3 * GROUP)
    w[:, GROUP : 2 * GROUP] *= 1000
    back = read_back(pack_weights.quantise(w), 16)
    for group in range(3):
        part = slice(group * GROUP, (group + 1) * GROUP)
        steps = np.ptp(w[:, part], axis=1) / 255
        assert (np.abs(back[:, part] - w[:, part]).max(axis=1) <= steps * 0.501).all()


def test_both_ends_of_a_group_come_back() -> None:
    """The smallest weight to the bit, the largest within rounding: a scale of one part in 255 too few cuts it off."""
    w = normal(rng(), 40, GROUP)
    back = read_back(pack_weights.quantise(w), 40)
    columns = np.arange(40)
    lowest, highest = w.argmin(axis=1), w.argmax(axis=1)
    np.testing.assert_array_equal(back[columns, lowest], w[columns, lowest])
    np.testing.assert_allclose(back[columns, highest], w[columns, highest], rtol=0, atol=1e-6)


def test_only_its_own_columns_of_a_stack_are_written() -> None:
    stack, team = pack_weights.empty_stack(2, 64, 40, quantised=True), ThreadTeam(2)
    assert isinstance(stack, int8.Int8Panels)
    for array in stack:
        array[:] = 9
    w = normal(rng(), 20, 40)
    pack_weights.store(team, stack, 1, 16, w)
    team.close()
    for array in stack:
        assert (array[0] == 9).all()
        assert (array[1, [0, 3]] == 9).all()
    np.testing.assert_array_equal(read_back(int8.Int8Panels._make(part[1, 1:3] for part in stack), 20), read_back(
        pack_weights.quantise(w), 20))  # fmt: skip


@pytest.mark.parametrize("storage", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("depth", [5, GROUP, 2 * GROUP + 9])
def test_an_embedding_is_read_from_the_heads_columns(storage: str, depth: int) -> None:
    """Or from a table of its own; tokens in any order, more than once, and none."""
    generator, vocab = rng(), 45
    w, team = normal(generator, vocab, depth), ThreadTeam(3)
    head: Any = pack_weights.empty_stack(1, vocab, depth, quantised=storage == "int8")
    columns = w
    if storage == "bfloat16":
        head, columns = bf16_matmul.empty_panels(1, vocab, depth), to_bfloat16(w)
        bf16_matmul.pack(team, w, head, 0, 0)
    else:
        pack_weights.store(team, head, 0, 0, w)
    if isinstance(head, int8.Int8Panels):
        columns = read_back(int8.Int8Panels._make(part[0] for part in head), vocab)
    none = np.empty((0, depth), np.float32)
    for tokens in ([], [vocab - 1], [3, 3, 0, 44, 16, 15, 3]):
        token_ids = np.array(tokens, np.int32)
        for table, expected in ((none, columns), (w, w)):
            out = np.full((len(tokens), depth), np.nan, np.float32)
            team.run(int8.embed, 1, token_ids, table, head, out)
            np.testing.assert_array_equal(out, expected[token_ids])
    team.close()
