"""Base weights in 8 bits: taken where the torch engine takes them, with its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from app.engine.config import CpuConfig, XlaConfig
from app.engine.xla.backend import JaxBackend
from app.kernels.matmul.quantised import Quantised
from tests.engine.adapters.making import random_adapter
from tests.engine.adapters.parity import random_tokens
from tests.engine.checkpoints import tiny_model
from tests.engine.cuda.grids import put_on_grids
from tests.engine.served import CONFIG, backend_of, served_logits
from tests.engine.xla.test_adapter_extras import jax_backend

PRODUCTS = {"head", "qkv", "o", "gate_up", "down"}


def _in_8_bits(backend: JaxBackend) -> set[str]:
    fields = backend._weights.layers._asdict() | {"head": backend._weights.head}
    return {name for name in PRODUCTS if isinstance(fields[name], Quantised)}


@pytest.mark.parametrize("family", ["llama", "qwen2 window on upper layers"])
@pytest.mark.parametrize(("on_grids", "storage"), [(True, "auto"), (False, "auto"), (False, "int8")])
def test_either_storage_has_the_torch_engines_bits(
    family: str, on_grids: bool, storage: Literal["auto", "int8"], tmp_path: Path
) -> None:
    model = tiny_model(family)
    torch_backend = backend_of(
        put_on_grids(model) if on_grids else model, tmp_path / "model", CONFIG.on(CpuConfig(weight_storage=storage))
    )
    backend = jax_backend(tmp_path / "model", CONFIG.on(XlaConfig(weight_storage=storage, skip_precompile=True)))
    assert _in_8_bits(backend) == (PRODUCTS if on_grids or storage == "int8" else set())
    adapters = [None, *(random_adapter(backend.spec, rank, seed=rank, size=0.3) for rank in (3, 16))]
    tokens = random_tokens(model, 2, 37)
    served, theirs = (served_logits(one, adapters, tokens) for one in (backend, torch_backend))
    np.testing.assert_array_equal(served, theirs)
    assert all(np.ptp(logits) > 0.1 for logits in served)
    for one in (backend, torch_backend):
        one.close()
