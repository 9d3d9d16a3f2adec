"""The GPU benchmarks on a tiny model without a GPU: every part runs, and what they report has the targets in it."""

from __future__ import annotations

import torch

from load_tests.engine import bench_gpu, llama_shapes
from tests.engine.cuda.gpu import TORCH


def test_every_part_is_measured() -> None:
    sizes = bench_gpu.Sizes(4, 20, 4, 64, 2, 2, 2, 3)
    found = bench_gpu.run("tiny", torch.device("cpu"), sizes, TORCH)
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
