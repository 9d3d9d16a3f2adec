"""Chooses the form of the products in bfloat16: the fastest that reproduces the reference's bits on this machine.

The test runs at every start; see `app.kernels.int8_matmul.self_test`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from app.kernels.bf16_matmul.amx import is_permitted
from app.kernels.bf16_matmul.cpu import Bf16Panels, empty_panels, for_form, multiply_bf16_panels, pack, rows_for
from app.kernels.bf16_matmul.reference import SMALLEST, Floats, bf16_matmul
from app.kernels.bf16_matmul.tiles import PANEL
from app.kernels.machine.jit import has_feature, jit
from app.kernels.machine.row_groups import round_rows
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam

#: Forms, the fastest first, and LLVM's names of the features that each needs.
_NEEDS = {"amx": ("amx-tile", "amx-bf16"), "avx512": ("avx512f",), "portable": ()}
#: (rows, depth): rows that fill tiles and that do not; whole blocks and a part, and more of them than stay in a cache.
_SIZES = ((1, 3 * GROUP), (3, GROUP + 7), (9, 2 * GROUP + 1), (19, GROUP), (33, 2 * GROUP + 7), (33, 17 * GROUP))
_NUM_COLUMNS = 5 * PANEL


@cache
def active_form() -> str | None:
    """The form to use on this machine; None if not even the portable one gives the reference's bits."""
    return next((form for form in machine_forms() if reproduces_reference(form)), None)


def machine_forms() -> list[str]:
    """The forms whose instructions this process may use, the fastest first."""
    forms = [form for form, features in _NEEDS.items() if all(has_feature(feature) for feature in features)]
    return [form for form in forms if form != "amx" or is_permitted()]


def reproduces_reference(form: str) -> bool:
    """Whether a form gives the reference's bits for random and for extreme operands."""
    generator = np.random.default_rng(0)
    return all(
        _is_equal(form, generator, num_rows, depth, extreme=extreme)
        for num_rows, depth in _SIZES
        for extreme in (False, True)
    )


def _is_equal(form: str, generator: np.random.Generator, num_rows: int, depth: int, *, extreme: bool) -> bool:
    x, w = (generator.standard_normal((count, depth), np.float32) for count in (num_rows, _NUM_COLUMNS))
    if extreme:  # sizes from that of the smallest number on, and sums that cancel
        half = depth // 2
        x, w = (part * SMALLEST ** generator.uniform(-0.5, 1, part.shape).astype(np.float32) for part in (x, w))
        x[:, half : 2 * half], w[:, half : 2 * half] = x[:, :half], w[:, :half]
        w[:, half:] *= np.float32(-1)
    start = generator.standard_normal((num_rows, _NUM_COLUMNS), np.float32) if not extreme else None
    out = np.zeros((num_rows, _NUM_COLUMNS), np.float32) if start is None else start.copy()
    expected = bf16_matmul(x, w, start)
    multiply_once(x, panels_for(w, form, num_rows), out, accumulate=start is not None)
    return bool(np.array_equal(out.view(np.int32), expected.view(np.int32)))


def panels_for(w: Floats, form: str, num_rows: int) -> Bf16Panels:
    """One layer's weights [N, K] for a form, and for products with up to num_rows rows."""
    panels = empty_panels(1, *w.shape)
    pack(ThreadTeam(1), w, panels, 0, 0)
    rows = rows_for(form, max(num_rows, 1) * panels.pairs.shape[2] * GROUP)
    return for_form(panels._replace(pairs=panels.pairs[0]), form, rows)


def multiply_once(x: Floats, w: Bf16Panels, out: Floats, *, accumulate: bool) -> None:
    """out (+)= x @ w, on one thread."""
    ThreadTeam(1).run(multiply_part, 2, x, 0, len(x), w, 0, len(w.pairs), out, accumulate)


@jit
def multiply_part(team, phase, x, low, high, w, first, end, out, accumulate):
    """out (+)= rows low to high of x @ panels first to end of w, on one thread. Two phases at most."""
    phase = round_rows(team, phase, x, w.rows)
    multiply_bf16_panels(w, low, x.shape[0], first, end, out[low:high], accumulate)
    return phase
