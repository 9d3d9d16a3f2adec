"""The bounds' arithmetic against a count of what a tiny model really holds; and every line is measured."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from app.engine.adapters.formats.reading import read_adapter
from app.engine.models.checkpoint import load_checkpoint
from load_tests.engine.bench_bounds import Settings, adapter_bytes, prompt_flops, run
from load_tests.random_adapters import write_random_adapter
from tests.engine.checkpoints import save, tiny_model


def test_every_line_is_measured_and_the_bounds_are_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_model("llama")
    path = save(model, tmp_path / "model")
    spec = load_checkpoint(path).spec
    linear = sum(m.weight.numel() for name, m in model.named_modules() if hasattr(m, "weight") and "proj" in name)
    heads = spec.layers[0].attention.num_heads * spec.layers[0].attention.head_dim
    attention = sum(4 * heads * visible for visible in range(1, 6)) * len(spec.layers)
    assert prompt_flops(spec, 5) == 2 * (5 * linear + spec.vocab_size * spec.hidden_size) + attention
    adapter = read_adapter(write_random_adapter(tmp_path / "adapter", spec, 8, seed=0), spec)
    assert adapter_bytes(spec, 8) == sum(a.nbytes + b.nbytes for a, b in adapter.weights.values())
    text = run(Settings(path, 20, (1, 3), rank=8, num_tokens=4, num_rounds=2, num_threads=1, seed=0))
    values = re.findall(r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|", text)
    assert len(values) == 3
    assert all(float(low) <= float(middle) <= float(high) for middle, low, high in values)
