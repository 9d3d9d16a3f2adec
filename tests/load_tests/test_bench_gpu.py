"""The GPU benchmarks on a tiny model without a GPU: every part runs, and what they report has the targets in it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from load_tests import bench_gpu, gpu_check, llama_shapes
from load_tests.gpu_check import Part


def test_every_part_is_measured() -> None:
    sizes = bench_gpu.Sizes(4, 20, 4, 64, 2, 2, 2, 3)
    found = bench_gpu.run("tiny", torch.device("cpu"), sizes, "torch")
    assert not [value for key, value in found.items() if key.endswith("failed")]
    text = bench_gpu.table(found)
    assert "not measured" not in text
    for title, key in bench_gpu.TARGETS_BY_RATIO:
        assert found[title]["ratio"][key]["median"] > 0
    assert found["loading"]["num loads"] == 3
    assert found["loading"]["adapter bytes on the device"] * 2 == found["loading"]["adapter bytes on the host"]


def test_batches_are_what_a_backend_expects() -> None:
    batch = llama_shapes.batch_of([3, 2, 4], [0, 5, 1], [0, 0, 2], 2, 50)
    assert batch.query_starts.tolist() == [0, 3, 5, 9]
    assert batch.seq_lens.tolist() == [3, 7, 5]
    assert batch.run_starts.tolist() == [0, 5, 9]
    assert batch.run_adapter_slots.tolist() == [0, 2]
    assert batch.kv_slots.tolist() == [0, 1, 2, 37, 38, 65, 66, 67, 68]


def test_a_part_that_fails_or_hangs_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    def part(name: str, code: str, limit_s: float, result: Path | None = None) -> Part:
        return Part(name, [sys.executable, "-c", code], limit_s, result)

    result = tmp_path / "result.json"
    parts = [
        part("good one", f"open({str(result)!r}, 'w').write('[1]'); print('| a | b |'); print('done')", 60, result),
        part("bad one", "raise SystemExit('broken')", 60),
        part("slow one", "import time; print('begun', flush=True); time.sleep(600)", 5),
    ]
    good, bad, slow = gpu_check.run_together(parts, tmp_path)
    assert (good.verdict, good.result, good.last_lines) == ("ok", [1], ["| a | b |", "done"])
    assert bad.verdict == "failed (1)"
    assert bad.last_lines == ["broken"]
    assert slow.verdict == "stopped at its limit"
    text = gpu_check.table({"gpu": "none"}, [good, bad, slow])
    assert "| bad one | failed (1)" in text
    assert "| a | b |" in text
    assert "broken" in text
