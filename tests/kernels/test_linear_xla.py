"""Linear modules as calls of XLA programs: the definition's product, bias, deltas and extras, on the real rows only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.extras.cpu import ATTENTION_NORM, MLP_NORM, ExtraTables, empty_tables
from app.kernels.extras.ffi import packed_tables
from app.kernels.linear import ffi
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import pack
from app.kernels.matmul.quantised import Quantised, Stack
from app.kernels.matmul.storing import dequantise, quantise
from app.kernels.sgmv.cpu import RowPlaces, adapter_runs, shrink_tasks
from app.kernels.sgmv.writing import WritePlans, matrices, write_plan
from tests.engine.cuda.grids import on_grids
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.test_sgmv import CASES, NARROW, PLACES, ROWS
from tests.seeds import rng

Floats = NDArray[np.float32]

#: One shape for every case, as in a program. Seven modules: q, k, v, o, gate, up, down.
TOKENS, RUNS, LAYERS, HIDDEN, INNER = 112, 16, 2, 40, 24
WIDTHS = (48, 16, 16, 48, 32, 32, 48)
DEPTHS = (HIDDEN, HIDDEN, HIDDEN, INNER, HIDDEN, HIDDEN, INNER)
EPS = 1e-5


def no_adapters(num_layers: int, d_in: int, d_out: int) -> ffi.Adapted:
    """Of a step of base tokens."""
    a = tuple(np.zeros((num_layers, 1, d_in, 8), np.float32) for _ in range(7))
    b = tuple(np.zeros((num_layers, d_out // 16, 8, 16), np.float32) for _ in range(7))
    return _adapted(a, b, np.zeros((num_layers, 1, 7), np.int32), _places(1), "no tokens", None)


def _places(num_slots: int) -> RowPlaces:
    return RowPlaces(np.zeros(num_slots, np.int32), np.zeros(num_slots, np.bool_))


def _adapted(
    a: tuple[Floats, ...], b: tuple[Floats, ...], ranks: NDArray[np.int32], places: RowPlaces, case: str,
    extras: ExtraTables | None,
) -> ffi.Adapted:  # fmt: skip
    counts, adapter_slots = [n for n, _ in CASES[case]], [s for _, s in CASES[case]]
    runs = adapter_runs(np.cumsum([0, *counts]).astype(np.int32), np.array(adapter_slots, np.int32))

    def lines(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        out = np.zeros((RUNS, 3), np.int32)
        out[: len(rows)] = rows
        return out

    slots = np.zeros(TOKENS, np.int32)
    for first, end, adapter_slot in runs:
        slots[first:end] = adapter_slot
    tables = empty_tables(*ranks.shape) if extras is None else extras
    num_extra = jnp.int32(0 if extras is None else len(runs))
    tasks = shrink_tasks(runs)
    return ffi.Adapted(
        a, b, *places, ranks, packed_tables(tables), lines(runs), jnp.int32(len(runs)), lines(tasks),
        jnp.int32(len(tasks)), jnp.int32(ranks.max()), lines(runs), num_extra, lines(runs[:0]), jnp.int32(0), slots,
        np.zeros(3, np.int32),
    )  # fmt: skip


class _Model:
    """Random weights, rank rows and extras, and the definition of what modules give with them."""

    def __init__(self, *, with_extras: bool, in_8_bits: bool) -> None:
        generator, self.in_8_bits = rng(), in_8_bits
        self.generator = generator
        self.w = [[normal(generator, width, depth) for width, depth in zip(WIDTHS, DEPTHS, strict=True)] for _ in "12"]
        if in_8_bits:
            self.w = [[on_grids(w, 4) for w in layer] for layer in self.w]
        self.bias = [[normal(generator, width) for width in WIDTHS] for _ in "12"]
        self.norm = normal(generator, LAYERS, HIDDEN)
        self.pairs: dict[tuple[int, ...], tuple[Floats, Floats]] = {}
        self.own: dict[tuple[str | int, ...], Floats] = {}
        self.ranks = np.zeros((LAYERS, len(PLACES), 7), np.int32)
        self.places = _places(len(PLACES))
        self.places.starts[:] = [start for start, _ in PLACES]
        a = tuple(np.full((LAYERS, ROWS // 8, depth, 8), np.nan, np.float32) for depth in DEPTHS)
        b = tuple(np.full((LAYERS, ROWS, width), np.nan, np.float32) for width in WIDTHS)
        self.tables = a, b
        self.extras = empty_tables(LAYERS, len(PLACES), 7) if with_extras else None
        self.held: list[Floats] = []
        for slot, (start, rank) in enumerate(PLACES[1:], start=1):
            modules, dtype = [], ml_dtypes.bfloat16 if slot in NARROW else np.float32
            for layer, n in np.ndindex(LAYERS, 7):
                if generator.integers(5) == 0:
                    continue  # a module that the adapter leaves alone
                a_n, b_n = (
                    normal(generator, rank, size).astype(dtype).astype(np.float32) for size in (DEPTHS[n], WIDTHS[n])
                )
                self.pairs[layer, slot, n] = a_n, b_n
                self.ranks[layer, slot, n] = rank
                modules.append((layer, n, a_n, b_n))
            too_fine = np.zeros(1, np.bool_)
            Team(1).run(write_plan, 2, WritePlans(a, b).plan(matrices(modules), start), too_fine)
            self.places.in_bf16[slot] = not too_fine[0]
        assert tuple(np.flatnonzero(self.places.in_bf16)) == NARROW
        if self.extras is not None:
            for name, odds in (("scales", 2), ("shifts", 2), ("weights", 4)):
                for place in np.argwhere(generator.integers(odds, size=self.ranks[:, 1:].shape) == 0):
                    layer, slot, n = place[0], place[1] + 1, place[2]
                    self._keep(name, (layer, slot, n), normal(generator, WIDTHS[n], *[DEPTHS[n]] * (name == "weights")))
            for slot in range(1, len(PLACES), 2):
                for norm in (ATTENTION_NORM, MLP_NORM):
                    self._keep("norms", (1, slot, norm), normal(generator, HIDDEN))

    def _keep(self, name: str, place: tuple[int, ...], values: Floats) -> None:
        self.own[name, *map(int, place)] = values
        self.held.append(pack(values) if name == "weights" else values)
        getattr(self.extras, name)[place] = self.held[-1].ctypes.data

    def adapted(self, case: str) -> ffi.Adapted:
        return _adapted(*self.tables, self.ranks, self.places, case, self.extras)

    def normed(self, x: Floats, slot: int, norm: int) -> NDArray[np.float64]:
        weight = self.own.get(("norms", 1, slot, norm), self.norm[1])
        return x / np.sqrt((x.astype(np.float64) ** 2).mean() + EPS) * weight

    def module(self, x: NDArray[np.float64], slot: int, n: int) -> NDArray[np.float64]:
        """Of layer 1."""
        place = 1, slot, n
        y = self.w[1][n].astype(np.float64) @ x + self.bias[1][n]
        if place in self.pairs:
            a, b = self.pairs[place]
            y += b.T.astype(np.float64) @ (a.astype(np.float64) @ x)
        if ("weights", *place) in self.own:
            y = self.own["weights", *place].astype(np.float64) @ x
        return y * self.own.get(("scales", *place), 1.0) + self.own.get(("shifts", *place), 0.0)

    def packed(self, modules: tuple[int, ...]) -> tuple[Stack, Floats]:
        """Panels and biases of both layers, modules side by side."""
        w: Stack = np.stack([np.concatenate([pack(layer[n]) for n in modules]) for layer in self.w])
        if self.in_8_bits:
            layers = [quantise(np.concatenate([layer[n] for n in modules])) for layer in self.w]
            np.testing.assert_array_equal(np.stack([dequantise(layer) for layer in layers]), w)
            w = Quantised(*(np.stack(parts) for parts in zip(*layers, strict=True)))
        return w, np.stack([np.concatenate([layer[n] for n in modules]) for layer in self.bias])


def _slots(case: str) -> list[int]:
    return [slot for count, slot in CASES[case] for _ in range(count)]


_norm_qkv = jax.jit(ffi.norm_qkv, static_argnums=5)
_norm_gated = jax.jit(ffi.norm_gated, static_argnums=(5, 8, 9))
_add_product = jax.jit(ffi.add_product, static_argnums=7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("with_extras", "in_8_bits"), [(False, False), (True, False), (True, True)])
def test_modules_of_a_layer_are_the_definitions_row_by_row(case: str, with_extras: bool, in_8_bits: bool) -> None:
    model, slots, layer = _Model(with_extras=with_extras, in_8_bits=in_8_bits), _slots(case), jnp.int32(1)
    adapted, count = model.adapted(case), len(slots)
    hidden = normal(model.generator, TOKENS, HIDDEN + 8)  # as wide as its panels
    wide = np.asarray(_norm_qkv(hidden, model.norm, *model.packed((0, 1, 2)), layer, EPS, jnp.int32(count), adapted))[
        :count
    ]
    gated = np.asarray(
        _norm_gated(hidden, model.norm, *model.packed((4, 5)), layer, EPS, jnp.int32(count), adapted, 32, False)
    )[:count]
    inner, w_o = normal(model.generator, TOKENS, INNER), model.packed((ffi.O_PROJ,))
    added = np.asarray(_add_product(hidden, inner, *w_o, layer, jnp.int32(count), adapted, ffi.O_PROJ))[:count]
    expected: list[list[NDArray[np.float64]]] = [[], [], []]
    for t, slot in enumerate(slots):
        x = model.normed(hidden[t, :HIDDEN], slot, ATTENTION_NORM)
        expected[0].append(np.concatenate([model.module(x, slot, n) for n in (0, 1, 2)]))
        x = model.normed(hidden[t, :HIDDEN], slot, MLP_NORM)
        gate, up = model.module(x, slot, 4), model.module(x, slot, 5)
        expected[1].append(gate / (1 + np.exp(-gate)) * up)
        expected[2].append(hidden[t] + model.module(inner[t].astype(np.float64), slot, ffi.O_PROJ))
    for found, rows in zip((wide, gated, added), expected, strict=True):
        assert np.isfinite(found).all()
        # A norm, a product and an activation follow each other.
        assert relative_error(found, np.array(rows).reshape(found.shape)) < 3 * TOLERANCE["float32"]
