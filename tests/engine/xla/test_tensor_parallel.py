"""One model on 1, 2, 4 and 8 devices: the same tokens, and no communication beyond the base model's.

XLA makes host devices only when a process starts, so the comparison runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.config import EngineConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.errors import ConfigError
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from app.engine.models.weight_names import expected_tensors
from app.engine.request import SamplingParams
from app.engine.xla.backend import XlaBackend
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import sizes_of
from tests.engine.adapters.random_adapters import random_adapter, random_tensors
from tests.fakes import fake_request
from tests.seeds import any_seed

ROOT = Path(__file__).parents[3]
COLLECTIVE = re.compile(r"= [^=]*\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")


def spec() -> ModelSpec:
    """8 heads; three layers; a vocabulary that 8 does not divide; fewer KV heads than 8 devices."""
    attention = AttentionSpec(8, 4, 8, 8**-0.5, RopeSpec((1.0, 0.1, 0.01, 0.001)), qkv_bias=True, o_bias=True)
    layer = LayerSpec(attention, MlpSpec(48, bias=True))
    return ModelSpec("tiny", "llama", "base", 61, 24, 64, 1e-5, True, (layer,) * 3, 1, (2,))


def with_scales_and_biases(model: ModelSpec, seed: int) -> LoraAdapter:
    """DoRA, lora_bias, and every bias of its own."""
    generator = np.random.default_rng(seed)

    def floats(*shape: int, centre: float = 0.0) -> NDArray[np.float32]:
        return generator.normal(centre, 0.3, shape).astype(np.float32)

    adapter = random_adapter(model, 6, ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"], seed=6)
    sizes = {key: pair.b.shape[1] for key, pair in adapter.weights.items()}
    changed = dataclasses.replace(
        adapter,
        magnitudes={key: floats(size, centre=1) for key, size in sizes.items()},
        delta_biases={key: floats(size) for key, size in sizes.items()},
        replaced={name: floats(*shape) for name, shape in expected_tensors(model).items() if name.endswith(".bias")},
    )
    card = dataclasses.replace(adapter.card, digest="scaled", extra_bytes=extra_bytes(changed, model))
    return dataclasses.replace(changed, card=card)


def observe(kernel_backend: str, shards: int, rank_rows: int, seed: int) -> dict[str, object]:
    """Tokens and log-probabilities of a few requests, and the collectives in the program that computed them."""
    model = spec()
    config = EngineConfig(
        num_kv_blocks=16,
        lora_pool_rows=rank_rows,
        max_loras=6,
        extra_weights_bytes=1 << 20,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        xla=XlaConfig.model_validate(
            {"kernel_backend": kernel_backend, "tensor_parallel": shards, "skip_precompile": True}
        ),
    )
    backend = XlaBackend(model, random_tensors(model, seed), config, make_mesh(jax.devices("cpu"), shards))
    engine = Engine(backend, config)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, num_logprobs=0)
    adapters: list[LoraAdapter | None] = [None]
    if rank_rows:
        adapters += [random_adapter(model, rank, seed=rank, dtype="BF16") for rank in (3, 8)]
        adapters += [random_adapter(model, 5, ["v_proj", "o_proj"], seed=5), with_scales_and_biases(model, seed)]
    for number, adapter in enumerate(adapters):
        engine.submit(fake_request(f"r{number}", [5 + number, 7, 9], adapter, sampling=sampling), adapter)
    lines = {}
    while engine.has_work:
        for chunk in engine.step():
            lines.setdefault(chunk.request_id, []).extend((line.token_id, line.logprob) for line in chunk.logprobs)
    text = backend.programs.program(backend.programs.buckets[-1]).as_text()  # the bucket of the prompts
    return {"lines": lines, "collectives": sorted(match[1] for match in COLLECTIVE.finditer(text))}


def observed_with_8_devices(cases: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What `observe` finds in a process that takes its CPU for eight devices."""
    code = (
        "import json, sys; from tests.engine.xla.test_tensor_parallel import observe; "
        "print(json.dumps([observe(*case) for case in json.loads(sys.argv[1])]))"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, json.dumps(cases)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_two_devices_exchange_two_sums_and_the_logits() -> None:
    """By day, where test_sharding.py has each device's part of every product; compiling takes seconds an engine."""
    (found,) = observed_with_8_devices([("xla", 2, 48, any_seed())])
    assert found["collectives"] == ["all-gather", "all-reduce", "all-reduce"]
    assert len(found["lines"]) == 5
    assert all(len(lines) == 4 for lines in found["lines"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("kernel_backend", ["xla", "pallas"])
def test_the_same_tokens_and_no_more_communication_on_1_2_4_and_8_devices(kernel_backend: str) -> None:
    seed = any_seed()
    cases = [(kernel_backend, shards, rows, seed) for shards, rows in ((1, 48), (2, 48), (4, 48), (8, 48), (8, 0))]
    found = observed_with_8_devices(cases)
    whole = found[0]
    assert len(whole["lines"]) == 5
    for split in found[1:4]:
        assert split["lines"].keys() == whole["lines"].keys()
        for name, lines in whole["lines"].items():
            for (token, logprob), (found_token, found_logprob) in zip(lines, split["lines"][name], strict=True):
                assert abs(logprob - found_logprob) <= 1e-4
                if token != found_token:
                    break  # both are likeliest: a tie, after which the answers are two
    assert whole["collectives"] == []
    # The layers share one loop body: a sum after o, one after down, and the logits' parts put together. The last
    # program was built without adapter tables; it has the same.
    for split in found[1:]:
        assert split["collectives"] == ["all-gather", "all-reduce", "all-reduce"]


def test_a_model_that_does_not_divide_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"engine\.xla\.tensor_parallel 3 does not divide tiny: q_proj falls into 8"):
        sizes_of(spec(), 3)
