"""The kernel backend: Pallas gives XLA's logits and tokens, and is refused where there is no kernel."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest
import torch

from app.engine.config import EngineConfig, XlaConfig
from app.engine.errors import ConfigError
from app.engine.models.spec import ModelSpec
from app.engine.xla.backend import XlaBackend, lora_kernel
from app.engine.xla.sharding import make_mesh
from tests.engine.adapters.random_adapters import random_adapter, random_mixture_adapter, random_tensors, tiny_spec
from tests.engine.batch_invariance import latent_spec, mixture_spec
from tests.engine.served import served_logits
from tests.seeds import rng

#: Steps have the largest shape, in which every token may be sampled.
CONFIG = EngineConfig(num_kv_blocks=64, lora_pool_rows=256, max_loras=8, max_num_batched_tokens=64, max_num_seqs=64)
TOLERANCE = 1e-4


def backend(kernel_backend: str, spec: ModelSpec) -> XlaBackend:
    device = XlaConfig.model_validate({"kernel_backend": kernel_backend, "skip_precompile": True})
    made = XlaBackend(spec, random_tensors(spec, 3), CONFIG.on(device), make_mesh(jax.devices("cpu"), 1))
    made.programs.buckets = made.programs.buckets[-1:]
    return made


@pytest.mark.parametrize(
    "spec",
    [tiny_spec(), *(pytest.param(spec, marks=pytest.mark.nightly) for spec in (mixture_spec(), latent_spec()))],
    ids=lambda spec: spec.family,
)
def test_adapters_of_different_ranks_have_the_logits_and_tokens_of_xla(spec: ModelSpec) -> None:
    ranks = (1, 8, 21, 64)
    if spec == tiny_spec():
        adapters = [random_adapter(spec, rank, seed=rank, size=0.3) for rank in ranks]
        adapters.append(random_adapter(spec, 5, ["v_proj", "down_proj"], seed=5, size=0.3))
    else:
        adapters = [random_mixture_adapter(spec, rank, rng()) for rank in ranks]
    tokens = torch.arange(3, 12)[None]
    found = {}
    for name in ("xla", "pallas"):
        made = backend(name, spec)
        found[name] = np.stack(served_logits(made, [None, *adapters], tokens))
        made.close()
    np.testing.assert_allclose(found["pallas"], found["xla"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found["pallas"].argmax(-1), found["xla"].argmax(-1))
    for logits in found["pallas"][1:]:
        assert np.abs(logits - found["pallas"][0]).max() > 100 * TOLERANCE, "the adapter changes something"


def test_pallas_is_interpreted_on_a_cpu_and_refused_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "app.engine.xla.backend"):
        lora_kernel("pallas", "cpu")
        assert len(caplog.records) == 1
        assert "interpreted" in caplog.text
        for kernel_backend, platform in (("pallas", "tpu"), ("xla", "cpu"), ("xla", "gpu"), ("xla", "tpu")):
            lora_kernel(kernel_backend, platform)
        assert len(caplog.records) == 1
    with pytest.raises(
        ConfigError, match=r"kernel_backend is 'pallas', a kernel for TPUs, but .*platform is 'gpu'; set kernel_backend"
    ):
        lora_kernel("pallas", "gpu")
