"""The same bits on every machine: tiles and instructions differ, the order of sums does not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.bits import digests

_ROOT = Path(__file__).parents[3]
_TILES = "from app.kernels.matmul import cpu; print(cpu.MOST_ROWS)"


def _run_for_avx2(*args: str) -> str:
    """What Python prints where kernels are compiled for a machine with AVX2 and sixteen vector registers."""
    environ = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=_ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for another machine of the same family")
def test_a_machine_with_avx2_alone_gives_the_same_bits() -> None:
    assert int(_run_for_avx2("-c", _TILES)) == 6
    assert _run_for_avx2("-m", "tests.kernels.bits") == digests()
