"""Linear modules with all that adapters do to them: the definition row by row, and a row's bits its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.activation.reference import Activation
from app.kernels.extra_weights.cpu import ExtraTables, empty_tables
from app.kernels.linear import reference
from app.kernels.linear.cpu import LinearExtras, LinearLora, gate_and_up, project
from app.kernels.linear.reference import ModuleAdapter
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL, pack
from app.kernels.sgmv.cpu import ModuleRows, adapter_runs, shrink_tasks
from app.kernels.sgmv.prefetch import NextShrink
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.test_sgmv import CASES, NARROW, PLACES, no_rows, write
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]
DEPTH = 40
#: Outputs of modules side by side: whole panels, but for the last. Always three: one form is compiled.
QKV, GATE_AND_UP = (48, 16, 33), (32, 32)


@dataclass
class Modules:
    """Random weights of modules side by side, and adapters of `PLACES` over some of them."""

    widths: tuple[int, ...]
    weights: list[Floats]
    bias: Floats
    rows: ModuleRows
    extras: ExtraTables
    adapters: tuple[dict[int, ModuleAdapter], ...]
    held: list[Floats] = field(default_factory=list)
    held_rows: list[NDArray[np.uint8]] = field(default_factory=list)

    def lora(self, runs: NDArray[np.int64], num_tokens: int) -> LinearLora:
        """`upcoming` is some shrink that is said to follow: it changes what memory is asked for, and no result."""
        upcoming = NextShrink(self.rows.a[:, :1], self.rows.ranks[:, :1], np.array([DEPTH]), self.rows.in_bf16)
        h = np.full((num_tokens, 3, 128), np.nan, np.float32)
        return LinearLora(self.rows, upcoming, runs, shrink_tasks(runs), 128, h)

    def own(self, runs: NDArray[np.int64], out: Floats) -> LinearExtras:
        return LinearExtras(
            self.extras, np.int64(0), np.int64(0), runs if self.held else runs[:0], np.full_like(out, np.nan)
        )

    def expect(self, x: Floats, slots: list[int], with_bias: bool) -> NDArray[np.float64]:
        at, parts = 0, []
        for w, adapters in zip(self.weights, self.adapters, strict=True):
            bias = self.bias[at : at + len(w)] if with_bias else None
            parts.append(reference.linear(x, w, bias, slots, adapters))
            at += len(w)
        return np.concatenate(parts, axis=1)


def modules(widths: tuple[int, ...], *, with_extras: bool) -> Modules:
    generator = rng()
    made = Modules(
        widths,
        [normal(generator, width, DEPTH) for width in widths],
        normal(generator, sum(widths)),
        no_rows(widths),
        empty_tables(1, len(PLACES), 7),
        tuple({} for _ in widths),
    )
    for slot, (_, rank) in enumerate(PLACES[1:], 1):
        pairs = {}
        for n, width in enumerate(widths):
            if n and generator.integers(4) == 0:
                continue  # a module that the adapter leaves alone
            a, b = normal(generator, rank, DEPTH), normal(generator, rank, width)
            if slot in NARROW:
                a, b = (values.astype(ml_dtypes.bfloat16).astype(np.float32) for values in (a, b))
            made.adapters[n][slot] = ModuleAdapter(a, b)
            pairs[n] = a, b
        made.held_rows.append(write(made.rows, slot, pairs))
    assert np.flatnonzero(made.rows.in_bf16).tolist() == list(NARROW)
    if with_extras:
        _add_extras(made, generator)
    return made


def _add_extras(made: Modules, generator: np.random.Generator) -> None:
    """Slot 2 scales, 3 shifts, 4 has a weight of its own, 5 all three; 1 and 6 have none."""
    names = {2: ("scale",), 3: ("shift",), 4: ("weight",), 5: ("weight", "scale", "shift")}
    for slot, kinds in names.items():
        for n, width in enumerate(made.widths):
            padded = np.zeros(-(-width // PANEL) * PANEL, np.float32)
            values: dict[str, Floats] = {}
            for kind in kinds:
                values[kind] = normal(generator, width, DEPTH) if kind == "weight" else normal(generator, width)
                stored = pack(values[kind]) if kind == "weight" else padded.copy()
                if kind != "weight":
                    stored[:width] = values[kind]
                made.held.append(stored)
                getattr(made.extras, f"{kind}s")[0, slot, n] = stored.ctypes.data
            made.adapters[n][slot] = made.adapters[n].get(slot, ModuleAdapter())._replace(**values)


def runs_of(case: list[tuple[int, int]]) -> tuple[NDArray[np.int64], list[int]]:
    """Runs of adapters, and every token's adapter slot."""
    starts = np.cumsum([0, *(n for n, _ in case)]).astype(np.int32)
    slots = [s for n, s in case for _ in range(n)]
    return adapter_runs(starts, np.array([s for _, s in case], np.int32)), slots


def run_project(
    made: Modules, x: Floats, case: list[tuple[int, int]], *, with_bias: bool = True, start: Floats | None = None,
    threads: int = 2,
) -> Floats:  # fmt: skip
    """The product of all modules [T, padded width], NaN in what was there before unless it is added to `start`."""
    runs, _ = runs_of(case)
    width = sum(-(-width // PANEL) * PANEL for width in made.widths)
    out = np.full((len(x), width), np.nan, np.float32)
    bias = np.empty(0, np.float32)
    if with_bias:
        bias = np.zeros(width, np.float32)
        bias[: len(made.bias)] = made.bias
    if start is not None:
        out[:, : start.shape[1]], out[:, start.shape[1] :] = start, 0.0
    team = ThreadTeam(threads)
    team.run(
        project, 2, x, np.concatenate([pack(part) for part in made.weights]), bias, start is not None,
        made.lora(runs, len(x)), made.own(runs, out), out,
    )  # fmt: skip
    team.close()
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_extras", [False, True])
def test_a_product_is_the_definition_row_by_row(case: str, with_extras: bool) -> None:
    made, with_bias = modules(QKV, with_extras=with_extras), bool(rng().integers(2))
    _, slots = runs_of(CASES[case])
    x = normal(rng(), len(slots), DEPTH)
    out = run_project(made, x, CASES[case], with_bias=with_bias)
    assert relative_error(out[:, : sum(made.widths)], made.expect(x, slots, with_bias)) < TOLERANCE["float32"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_extras", [False, True])
def test_a_product_is_added_to_the_residual_which_no_extra_scales(case: str, with_extras: bool) -> None:
    made = modules(QKV, with_extras=with_extras)
    _, slots = runs_of(CASES[case])
    x, start = normal(rng(), len(slots), DEPTH), normal(rng(), len(slots), sum(QKV))
    out = run_project(made, x, CASES[case], start=start)
    expected = start + made.expect(x, slots, with_bias=True)
    assert relative_error(out[:, : sum(QKV)], expected, start) < TOLERANCE["float32"]


@pairwise(
    {"case": CASES, "activation, with_extras": [("silu", False), ("silu", True), ("gelu_tanh", True)]}, strength=1
)
def test_gate_and_up_are_the_definition_row_by_row(case: str, activation: Activation, with_extras: bool) -> None:
    made = modules(GATE_AND_UP, with_extras=with_extras)
    runs, slots = runs_of(CASES[case])
    x = normal(rng(), len(slots), DEPTH)
    wide, out = np.full((len(x), 64), np.nan, np.float32), np.full((len(x), 32), np.nan, np.float32)
    team = ThreadTeam(2)
    team.run(
        gate_and_up, 2, x, np.concatenate([pack(part) for part in made.weights]), made.bias, made.lora(runs, len(x)),
        made.own(runs, wide), activation == "gelu_tanh", wide, out,
    )  # fmt: skip
    team.close()
    biases = made.bias[:32], made.bias[32:]
    expected = reference.gate_and_up(
        x, (made.weights[0], made.weights[1]), biases, slots, (made.adapters[0], made.adapters[1]), activation
    )
    # A product and an activation follow each other.
    assert relative_error(out, expected) < 3 * TOLERANCE["float32"]


def test_a_product_begins_before_the_shrink_has_ended_and_expands_afterwards() -> None:
    """Another thread holds the shrink's first piece until this one multiplies; only then is h complete."""
    made, (runs, slots) = modules(QKV, with_extras=False), runs_of([(4, 4), (5, 6)])
    x, width = normal(rng(), len(slots), DEPTH), sum(-(-width // PANEL) * PANEL for width in QKV)
    w, bias = np.concatenate([pack(part) for part in made.weights]), np.zeros(0, np.float32)
    expected, out = np.full((2, len(x), width), np.nan, np.float32)
    whole, late = made.lora(runs, len(x)), made.lora(runs, len(x))
    ThreadTeam(1).run(project, 2, x, w, bias, False, whole, made.own(runs, expected), expected)
    team = np.zeros((2, 16), np.int64)
    team[0, 0] = 1
    thread = threading.Thread(
        target=project, args=(team, 0, x, w, bias, False, late, made.own(runs, out), out), daemon=True
    )
    thread.start()
    until = time.monotonic() + 60
    while team[1, 0] == 0:
        assert time.monotonic() < until, "the product waits for the shrink"
        time.sleep(0.001)
    late.h[:] = whole.h
    team[0, 8] += 1
    thread.join(60)
    assert np.array_equal(out, expected)


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    generator = rng()
    made = modules(QKV, with_extras=True)
    for slot in range(len(PLACES)):
        row = normal(generator, 1, DEPTH)
        alone = run_project(made, row, [(1, slot)], threads=1)
        for _ in range(4):
            case = [(int(generator.integers(1, 20)), int(generator.integers(len(PLACES)))) for _ in range(3)]
            case.insert(int(generator.integers(4)), (int(generator.integers(1, 20)), slot))
            _, slots = runs_of(case)
            x = normal(generator, len(slots), DEPTH)
            at = int(generator.choice(np.flatnonzero(np.array(slots) == slot)))
            x[at] = row[0]
            out = run_project(made, x, case, threads=int(generator.integers(1, 5)))
            assert np.array_equal(out[at, : sum(made.widths)], alone[0, : sum(made.widths)]), (slot, case, at)
