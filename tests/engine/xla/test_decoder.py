"""The JAX decoder against transformers, family by family, through block tables and chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from app.engine.config import EngineConfig, XlaConfig
from app.engine.models.checkpoint import Checkpoint
from app.engine.xla.adapters import XlaAdapters, base_tables
from app.engine.xla.arrays import KvMemory
from app.engine.xla.backend import XlaBackend, lora_kernel
from app.engine.xla.decoder import forward
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import sizes_of
from app.engine.xla.step import PREFILL_TILE, Bucket
from app.engine.xla.weights import read_weights
from tests.engine.adapters.random_adapters import tiny_spec
from tests.engine.checkpoints import FAMILIES, MIXTURES
from tests.engine.logits_check import NUM_BLOCKS, check_family, check_prompt_logprobs
from tests.engine.xla.tiny_backends import random_tensors

CONFIG = EngineConfig(num_kv_blocks=NUM_BLOCKS, lora_pool_rows=8, max_num_batched_tokens=64, max_num_seqs=8)
LENGTHS = (1, 20, 41)
SERVED = (*FAMILIES, *MIXTURES)


@pytest.mark.parametrize("family", SERVED)
def test_logits_equal_transformers_in_one_piece_and_in_chunks(family: str, tmp_path: Path) -> None:
    config = CONFIG.on(XlaConfig(skip_precompile=True))

    def make_backend(checkpoint: Checkpoint) -> XlaBackend:
        return XlaBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))

    def chunk_end(generator: np.random.Generator, start: int) -> int:
        """At least two tokens each: one program for everything."""
        end = min(LENGTHS[2], start + int(generator.integers(2, 20)))
        return LENGTHS[2] if end == LENGTHS[2] - 1 else end

    check_family(family, tmp_path, make_backend, LENGTHS, chunk_end)


@pytest.mark.parametrize("kernel_backend", ["xla", "pallas"])
def test_a_whole_step_lowers_for_tpus(kernel_backend: str) -> None:
    """Lowered, not run: there is no TPU here."""
    spec = tiny_spec()
    sizes = sizes_of(spec, 1)
    weights = read_weights(sizes, random_tensors(spec), 64)
    mesh = make_mesh(jax.devices("cpu"), 1)
    adapters = XlaAdapters(sizes, weights, 2, 32, 0, mesh)
    tables = base_tables(adapters.table_shapes())
    kv = jax.ShapeDtypeStruct((2, NUM_BLOCKS, 2, 16, 8), np.float32)
    bucket = Bucket(64, 8, PREFILL_TILE, 8)
    add_deltas = lora_kernel(kernel_backend, "tpu")
    step = jax.jit(partial(forward, bucket=bucket, sizes=sizes, add_deltas=add_deltas), donate_argnums=(3,))
    flat = jax.ShapeDtypeStruct((bucket.size,), np.int32)
    traced = step.trace(weights, tables, adapters.places(), KvMemory(kv, kv), flat)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("stablehlo.while") >= 1
    kernels = 7 if kernel_backend == "pallas" else 0  # one for each target of a layer, in the layers' one loop body
    assert lowered.count("custom_call @tpu_custom_call") == kernels


def test_what_one_shard_computes_follows_from_the_table_of_products() -> None:
    sizes = sizes_of(tiny_spec(), 2)
    assert [module.width() for module in sizes.modules] == [16 + 8 + 8, 24, 20 + 20, 24]
    assert [sizes.total_width(module) for module in sizes.modules] == [64, 24, 80, 24]
    assert [module.d_in for module in sizes.modules] == [24, 16, 24, 20]
    assert (sizes.kv_heads, sizes.vocab_per_shard, sizes.num_layers) == (1, 32, 2)


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_log_probabilities_of_prompts_equal_transformers(family: str, tmp_path: Path) -> None:
    config = CONFIG.on(XlaConfig(skip_precompile=True))

    def make_backend(checkpoint: Checkpoint) -> XlaBackend:
        return XlaBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))

    check_prompt_logprobs(family, tmp_path, make_backend)
