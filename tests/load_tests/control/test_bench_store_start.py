"""The benchmark of a store's start, on little: both lines are measured, and what they check holds."""

from __future__ import annotations

from pathlib import Path

from load_tests.control import bench_store_start


def test_both_lines_are_measured(tmp_path: Path) -> None:
    lines = bench_store_start.run(10, 30, tmp_path).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| a store starts with 10 objects on its disk | ")
    assert lines[3].startswith("| 30 loads of a dead store are taken up")
