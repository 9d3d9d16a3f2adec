"""Tests as on other machines: each in its environment, failures named, the command's status theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests import cpu_emulation

_TESTS = """
import os
import numpy as np

def test_settings_are_there():
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"
    assert os.environ["NUMBA_CPU_NAME"] == "haswell"

def test_numpy_has_no_avx512():
    from numpy._core._multiarray_umath import __cpu_features__
    assert not __cpu_features__["X86_V4"]
"""


def test_a_machine_is_its_settings_and_failures_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    with pytest.raises(SystemExit) as ended:
        cpu_emulation.main(["--machines", "haswell", str(tmp_path)])
    assert ended.value.code == 0
    (tmp_path / "test_it.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(SystemExit) as ended:
        cpu_emulation.main(["--machines", "haswell", str(tmp_path)])
    assert ended.value.code == 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| haswell"))
    assert "2 passed" in first
    assert "test_it.py::test_wrong |" in second


def test_what_cannot_be_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="status 4 as on 'this'"):
        cpu_emulation.main(["--machines", "this", str(tmp_path / "absent.py")])
    with pytest.raises(SystemExit, match="2"):
        cpu_emulation.main(["--machines", "this,z80"])
    assert "no such machine: z80" in capsys.readouterr().err


def test_every_usual_test_is_there() -> None:
    assert all((Path(cpu_emulation.__file__).parents[1] / path).exists() for path in cpu_emulation.TESTS)
