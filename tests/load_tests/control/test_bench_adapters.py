"""The adapter benchmark on a tiny model: every line is measured, and nothing fails."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from app.engine.adapters.formats.reading import read_adapter
from load_tests.control.bench_adapters import Settings, _host_bytes, run
from load_tests.random_adapters import write_random_adapter
from tests.engine.adapters.random_adapters import tiny_spec
from tests.engine.checkpoints import save, tiny_model


def test_every_line_is_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = save(tiny_model("llama"), tmp_path / "model")
    settings = Settings(model, num_repeats=3, num_adapters=40, num_resident=4, num_requests=60, num_threads=1)
    text = run(settings)
    times = re.findall(r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|", text)
    assert len(times) == 7
    assert all(float(low) <= float(middle) <= float(high) for middle, low, high in times)
    assert "40 adapters registered (rank 8), room for 4 on device" in text
    assert "| errors | 0 |" in text
    on_device, in_host = (int(value) for value in re.findall(r"(\d+)% of requests", text))
    assert 0 < on_device < 100, "some were found, some had to be written"
    assert in_host == 100, "the bound on host memory is above forty"


def test_host_memory_has_room_for_as_many_as_asked(tmp_path: Path) -> None:
    settings = Settings(tmp_path, num_host=40, small_rank=64)
    spec = tiny_spec(num_layers=8)
    folder = write_random_adapter(tmp_path / "a", spec, settings.small_rank, 0, ["q_proj"], bf16=True)
    held_bytes = read_adapter(folder, spec).card.size_bytes
    assert _host_bytes(settings, spec) > 1 << 20, "no floor in the way"
    assert _host_bytes(settings, spec) // held_bytes == settings.num_host
