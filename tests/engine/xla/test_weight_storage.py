"""Base weights in 8 bits: taken where the CPU engine takes them, with its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.engine.config import CpuConfig, WeightStorage, XlaConfig
from app.engine.errors import ConfigError
from app.engine.xla.backend import JaxBackend
from app.kernels.matmul.quantised import Quantised
from tests.engine.adapters.making import random_adapter
from tests.engine.adapters.parity import random_tokens
from tests.engine.checkpoints import tiny_model
from tests.engine.cuda.grids import put_on_grids
from tests.engine.served import CONFIG, backend_of, served_logits
from tests.engine.xla.making import tiny_backend
from tests.engine.xla.test_adapter_extras import jax_backend, jax_config

PRODUCTS = {"head", "qkv", "o", "gate_up", "down"}
#: What docs/explanation/engines.md says of the two engines. Adapters are large here: their deltas outweigh the base.
TOLERANCE = 1e-4


def in_8_bits(backend: JaxBackend) -> set[str]:
    """Names of the products that are."""
    stacks = backend._weights.layers.products | {"head": backend._weights.head}
    return {name for name, stack in stacks.items() if isinstance(stack, Quantised)}


@pytest.mark.parametrize("family", ["llama", "qwen2 window on upper layers"])
@pytest.mark.parametrize(("on_grids", "storage"), [(True, "auto"), (False, "auto"), (False, "int8")])
def test_either_storage_has_the_cpu_engines_logits(
    family: str, on_grids: bool, storage: WeightStorage, tmp_path: Path
) -> None:
    model = tiny_model(family)
    cpu_backend = backend_of(
        put_on_grids(model) if on_grids else model, tmp_path / "model", CONFIG.on(CpuConfig(weight_storage=storage))
    )
    device = XlaConfig(weight_storage=storage, skip_precompile=True)
    backend = jax_backend(tmp_path / "model", jax_config("cpu").on(device))
    assert in_8_bits(backend) == (PRODUCTS if on_grids or storage == "int8" else set())
    adapters = [None, *(random_adapter(backend.spec, rank, seed=rank, size=0.3) for rank in (3, 16))]
    tokens = random_tokens(model, 2, 37)
    served, theirs = (served_logits(one, adapters, tokens) for one in (backend, cpu_backend))
    np.testing.assert_allclose(served, theirs, rtol=0, atol=TOLERANCE)
    assert all(np.ptp(logits) > 0.1 for logits in served)
    for one in (backend, cpu_backend):
        one.close()


def test_the_xla_form_refuses_8_bits_by_name() -> None:
    config = CONFIG.on(XlaConfig(form="xla", weight_storage="int8"))
    with pytest.raises(ConfigError, match="weight_storage is 'int8' but the form 'xla' keeps float32"):
        tiny_backend(config)
