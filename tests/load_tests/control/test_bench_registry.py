"""The registry's benchmark on a small table: every line is measured, and what it checks holds."""

from __future__ import annotations

from pathlib import Path

from load_tests.control import bench_registry


def test_every_line_is_measured(tmp_path: Path) -> None:
    lines = bench_registry.run(7_000, 3, tmp_path).splitlines()
    assert lines[0] == "| 7,000 adapters registered | |"
    values = dict(line.strip("| ").split(" | ") for line in lines[2:])
    assert len(values) == 19
    assert all(any(digit in value for digit in "123456789") or "MiB" in value for value in values.values())
