"""Products by group inside XLA programs: what a helper does that comes when the call is over."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from app.kernels.moe_lora.ffi import _multiply_busy
from app.kernels.xla_call import MAX_PHASES
from tests.seeds import rng

ROWS, DEPTH, PANELS = 9, 40, 3


@pytest.mark.parametrize("now", [(0, 3, 6, 9), (0, 0, 0, 0), (9, 7, 9, 1 << 20)], ids=["more", "none", "no groups"])
def test_who_comes_late_finds_no_work_whatever_has_become_of_the_groups(now: tuple[int, ...]) -> None:
    """XLA has put something else where the groups were, by which nobody may count pieces and wait for them."""
    stack = rng().normal(size=(3, PANELS, DEPTH, 16)).astype(np.float32)
    x = rng().normal(size=(ROWS, DEPTH)).astype(np.float32)
    team, out = np.zeros((MAX_PHASES, 16), np.int64), np.zeros((ROWS, 16 * PANELS), np.float32)
    starts = np.array([0, 9, 9, 9], np.int32)
    _multiply_busy(team, 0, x, starts, stack, np.int32(0), out)
    expected = np.einsum("tk,pkn->tpn", x, stack[0]).reshape(ROWS, -1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    starts[:] = now
    out[:] = np.nan
    late = threading.Thread(target=_multiply_busy, args=(team, 0, x, starts, stack, np.int32(0), out), daemon=True)
    late.start()
    late.join(60)
    assert not late.is_alive()
    assert np.isnan(out).all()
