"""How many base products a step takes on the CPU, whatever adapters it holds: its multiply-adds are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.batch_invariance import dense_spec, mixture_spec
from tests.engine.cpu.tile_counting import Counts

ROOT = Path(__file__).parents[3]


def counts(model: str, storage: str, cache: Path) -> Counts:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.cpu.tile_counting", model, storage],
        cwd=ROOT,
        env=os.environ | {"POLYLORA_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Counts(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.nightly  # compiling the kernels anew takes a minute or two
@pytest.mark.parametrize("storage", ["float32", "auto"])
def test_several_adapters_in_one_request_take_one_base_product_per_module(storage: str, tmp_path: Path) -> None:
    """Every weight of the base meets every token of the step once, and the head's every sampled row."""
    found = counts("dense", storage, tmp_path)
    assert found.own > 0, "adapters' products were seen, too"
    layers = len(dense_spec().layers)
    once = {name: [[found.tokens] * 2] * layers for name in ("qkv", "o", "gate_up", "down")}
    assert found.met == once | {"head": [[found.samples] * 2]}


@pytest.mark.nightly
def test_the_same_with_experts_of_which_each_meets_the_tokens_that_chose_it(tmp_path: Path) -> None:
    found, spec = counts("mixture", "auto", tmp_path), mixture_spec()
    mixed = [layer.experts.router for layer in spec.layers if layer.experts is not None]
    everybody = {"qkv": 3, "o": 3, "gate_up": 1, "down": 1, "experts.router": 2}
    shared = {f"experts.shared_{name}": 2 for name in ("gate", "gate_up", "down")}
    for name, layers in (everybody | shared).items():
        assert found.met.pop(name) == [[found.tokens] * 2] * layers
    assert found.met.pop("head") == [[found.samples] * 2]
    assert set(found.met) == {"experts.gate_up", "experts.down"}
    for of_experts in found.met.values():
        assert all(least == most for least, most in of_experts)
        per_layer = [sum(most for _, most in of_experts[i * 6 : (i + 1) * 6]) for i in range(len(mixed))]
        assert per_layer == [found.tokens * router.top_k for router in mixed]
