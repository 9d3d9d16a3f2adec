"""The JAX decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from app.engine.adapters.lora import TARGETS
from app.engine.config import EngineConfig, XlaConfig
from app.engine.models.checkpoint import Checkpoint
from app.engine.xla.arrays import AdapterTables, KvMemory
from app.engine.xla.backend import JaxBackend
from app.engine.xla.decoder import forward
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import Form, sizes_of
from app.engine.xla.step import PREFILL_TILE, Bucket
from app.engine.xla.tables import XlaAdapters
from app.engine.xla.weights import read_weights
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.making import random_adapter, tiny_spec
from tests.engine.checkpoints import FAMILIES
from tests.engine.logits_check import NUM_BLOCKS, check_family
from tests.engine.xla.making import random_tensors

CONFIG = EngineConfig(num_kv_blocks=NUM_BLOCKS, adapter_rank_rows=8, max_batch_tokens=64, max_batch_sequences=8)
LENGTHS = (1, 20, 41)
#: The forms share the rope tables, in which the other families differ.
FOR_XLA = ("llama tied, biased", "llama one kv head", "mistral window", "qwen2 window on upper layers", "qwen3")


@pytest.mark.parametrize(
    ("family", "form"), [*((family, "cpu") for family in FAMILIES), *((family, "xla") for family in FOR_XLA)]
)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, form: str, tmp_path: Path) -> None:
    config = CONFIG.on(XlaConfig(form=form, skip_precompile=True))

    def make_backend(checkpoint: Checkpoint) -> JaxBackend:
        return JaxBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        """At least two tokens each: one program for everything."""
        end = min(LENGTHS[2], start + int(generator.integers(2, 20)))
        return LENGTHS[2] if end == LENGTHS[2] - 1 else end

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)


def test_deltas_in_pallas_give_the_same_logits() -> None:
    """Interpreted here. One prompt of three adapters' tokens and the base's."""
    spec, tensors = tiny_spec(), random_tensors(tiny_spec(), 5)
    adapters = [random_adapter(spec, rank, targets) for rank, targets in ((3, TARGETS), (16, ["q_proj", "down_proj"]))]
    found = []
    for form in ("xla", "pallas"):
        config = CONFIG.on(XlaConfig(form=form, skip_precompile=True))
        config = config.model_copy(update={"adapter_rank_rows": 32, "max_batch_tokens": 16})
        backend = JaxBackend(spec, tensors, config, make_mesh(jax.devices("cpu"), 1))
        for slot, adapter in enumerate(adapters, start=1):
            backend.write_adapter(slot, (slot - 1) * 8 * slot, adapter)
        pieces = [Piece(np.arange(3) + 5, 0, np.array([slot]), slot) for slot in range(3)]
        backend.forward(forward_batch(pieces, 16))
        found.append(backend.logits(3))
    assert np.abs(found[0] - found[1]).max() <= 1e-5
    assert np.abs(np.diff(found[0], axis=0)).max() > 1e-2, "adapters change the logits"


@pytest.mark.parametrize("form", ["xla", "pallas"])
def test_a_whole_step_lowers_for_tpus(form: Form) -> None:
    """Lowered, not run: there is no TPU here."""
    spec = tiny_spec()
    sizes = sizes_of(spec, 1, form, interpret=False)
    weights = read_weights(spec, sizes, random_tensors(spec), 64)
    adapters = XlaAdapters(spec, sizes, weights, 2, 1 << 16, make_mesh(jax.devices("cpu"), 1))
    tables = adapters.tables(AdapterTables(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in adapters.shapes(32))))
    kv = jax.ShapeDtypeStruct((2, NUM_BLOCKS, 2, 16, 8), np.float32)
    bucket = Bucket(64, 8, PREFILL_TILE, 8)
    step = jax.jit(partial(forward, bucket=bucket, sizes=sizes), donate_argnums=(2,))
    traced = step.trace(weights, tables, KvMemory(kv, kv), jax.ShapeDtypeStruct((bucket.size,), np.int32))
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    # Shrink and expand of seven modules, in the one body that all layers share.
    assert lowered.count("tpu_custom_call") == (14 if form == "pallas" else 0)
    assert lowered.count("stablehlo.while") >= 1
