"""What the benchmark of vLLM's front ends prints, and that its settings are valid; no server is started."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import yaml

from app.cli.config_file import settings_of
from load_tests.http import bench_vllm
from load_tests.http.bench_vllm import BASE, NUM_ADAPTERS, POLYLORA, RAY, VLLM, Bench, Case, run, settings


class Measured(Bench):
    """Rates of three systems, without servers."""

    def measure(self, case: Case) -> float:
        self.first_s[case] += [0.010, 0.020]
        if case.system == POLYLORA:
            self.cpu_us[case]["engine"].append(30.0)
        return {VLLM: 100.0, POLYLORA: 98.0, RAY: 90.0}[case.system] * case.num_streams


@pytest.mark.parametrize("has_ray", [True, False])
def test_ratios_are_within_a_round_and_ray_has_no_adapters(has_ray: bool) -> None:
    systems = (VLLM, POLYLORA, RAY)[: 3 if has_ray else 2]
    lines: list[str] = []
    table = run(Measured(dict.fromkeys(systems, "http://none/v1"), ["a"], 4, 1, 0), (1, 8), 2, lines.append)
    _, _, base, more, adapters, _ = (line.strip("| ").split(" | ") for line in table.splitlines())
    other = "0.90 (0.90 to 0.90)" if has_ray else "not measured"
    assert base[:5] == [BASE, "1", "100.0", "0.98 (0.98 to 0.98)", other]
    assert more[:3] == [BASE, "8", "800.0"]
    assert adapters[:5] == [str(NUM_ADAPTERS), "1", "100.0", "0.98 (0.98 to 0.98)", "not measured"]
    assert base[5:7] == ["15/20 ms", "15/20 ms"]
    assert base[-1] == "engine 30"
    assert len(lines) == 2 * (2 * len(systems) + 2 * 2), "a line a measurement"


def test_the_settings_are_those_of_a_service(tmp_path: Path) -> None:
    adapters = [tmp_path / "loras" / name for name in ("a", "b")]
    (tmp_path / "loras").mkdir()
    path = settings(Path(sys.executable), tmp_path / "model", adapters, 32, tmp_path)
    found = settings_of(yaml.safe_load(path.read_text()), path)
    assert found.engine.vllm is not None
    assert (found.model.name, found.engine.max_num_seqs) == (BASE, 32)
    assert [each.name for each in found.adapters.preload] == ["a", "b"]
    ast.parse(bench_vllm._RAY_SCRIPT)
