"""The JAX engine's backend: puts weights on devices, owns KV memory and adapter tables, calls programs.

Every array is an argument of a pure program; KV memory and tables are donated, so they are written in place. All
programs, including those that write adapters, are compiled before they are called: no adapter, rank or batch triggers a
compilation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import Backend, BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig, XlaConfig
from app.engine.errors import ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.spec import ModelSpec
from app.engine.xla import sharding
from app.engine.xla.adapters import XlaAdapters, base_tables, rank_classes, write_rows
from app.engine.xla.arrays import EXPERT_AXIS, TENSOR_AXIS, KvMemory, StepResult
from app.engine.xla.decoder import AddDeltas, forward
from app.engine.xla.moe_lora_tables import PAGES_AT_ONCE, write_pages
from app.engine.xla.programs import Programs, ladder
from app.engine.xla.sampling import sample
from app.engine.xla.sizes import sizes_of
from app.engine.xla.step import Bucket, pack
from app.engine.xla.weights import read_weights
from app.kernels.paged_attention.xla import blocks_per_group
from app.kernels.sgmv import pallas
from app.kernels.sgmv.xla import RANK_CHUNK, add_deltas

_LOGGER = logging.getLogger(__name__)


class XlaBackend:
    """Weights on one device or split over several; float32 arithmetic."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[tuple[str, NDArray[Any]]], config: EngineConfig, mesh: Mesh
    ) -> None:
        """Raises CheckpointError for tensors that do not fit the spec, ConfigError for sizes that do not fit `mesh` or
        a kernel backend that its devices lack.
        """
        xla = config.section(XlaConfig)
        self.spec, self._mesh = spec, mesh
        self._add_deltas = lora_kernel(xla.kernel_backend, mesh.devices.flat[0].platform)
        self._sizes = sizes_of(spec, mesh.shape[TENSOR_AXIS], mesh.shape[EXPERT_AXIS])
        self.limits = BackendLimits(
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            lora_pool_rows=config.lora_pool_rows // RANK_CHUNK * RANK_CHUNK,
            rank_alignment=RANK_CHUNK,
            max_loras=config.max_loras,
            extra_weights_bytes=config.extra_weights_bytes,
        )
        self._num_kv_slots = config.num_kv_blocks * config.block_size
        if self._num_kv_slots >= 1 << 31:
            raise ConfigError(f"{self._num_kv_slots} KV slots do not fit 32-bit indices; lower engine.num_kv_blocks")
        if xla.compilation_cache_dir:
            _use_cache(xla.compilation_cache_dir)
        max_positions = min(spec.max_positions, config.max_model_len or spec.max_positions)
        weights = read_weights(self._sizes, tensors, max_positions)
        self._weights = self._put(weights, sharding.weight_specs(weights, self._sizes))
        self._kv = self._new_kv_memory(config)
        self._adapters = XlaAdapters(
            self._sizes, self._weights, config.max_loras, self.limits.lora_pool_rows,
            config.extra_weights_bytes, mesh,
        )  # fmt: skip
        self.limits = replace(self.limits, extra_bytes_of=self._adapters.experts.extra_bytes)
        self._row_specs = self._adapters.specs()
        self._tables = self._put(base_tables(self._adapters.table_shapes()), self._row_specs)
        num_blocks = min(-(-max_positions // config.block_size), config.num_kv_blocks)
        per_group = blocks_per_group(config.block_size)
        table_width = -(-num_blocks // per_group) * per_group
        self._classes = rank_classes(self.limits.lora_pool_rows)
        self._writers: dict[int, Any] = {}
        self._page_writer: Any = None
        start = time.perf_counter()
        if not xla.skip_precompile:
            self._adapters.warm_up()
            self._writers = {count: self._compile_writer(count) for count in self._classes}
            self._page_writer = self._compile_page_writer()
        self.writers_compile_s = time.perf_counter() - start
        # Programs are compiled for these shapes: the arrays themselves are donated while others compile.
        self._argument_shapes = jax.tree.map(
            _shape_of, (self._weights, self._tables, self._adapters.places(), self._kv)
        )
        self.programs = Programs(ladder(config, table_width), self._compile, skip_precompile=xla.skip_precompile)
        self._last: StepResult | None = None

    @property
    def compile_s(self) -> float:
        """See `Backend.compile_s`."""
        return self.writers_compile_s + self.programs.compile_s

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """See `Backend.prepare_adapter`. Also raises AdapterMismatch for a feature that this engine does not serve."""
        self._adapters.prepare(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """See `Backend.write_adapter`. Raises AdapterMismatch as `prepare_adapter` does."""
        self._adapters.prepare(adapter)
        for pages, numbers in self._adapters.experts.write(adapter_slot, adapter):
            if self._page_writer is None:  # only with skip_precompile
                self._page_writer = self._compile_page_writer()
            written = self._page_writer(self._tables.experts, pages, numbers)
            self._tables = self._tables._replace(experts=written)
        if all(key.expert is not None for key in adapter.weights):  # nothing else of its slot is read
            self._adapters.assign(adapter_slot, 0, adapter)
            return
        count = next(count for count in self._classes if count >= adapter.card.max_rank)
        if count not in self._writers:  # only with skip_precompile
            self._writers[count] = self._compile_writer(count)
        rows = self._adapters.rows_of(adapter, count)
        self._tables = self._writers[count](self._tables, rows, np.int32(row_start))
        self._adapters.assign(adapter_slot, row_start, adapter)

    def is_ready(self, adapter_slot: int) -> bool:  # noqa: ARG002
        """See `Backend.is_ready`: writes finish before `write_adapter` returns."""
        return True

    def release_adapter(self, adapter_slot: int) -> None:
        """See `Backend.release_adapter`: frees the adapter's pages; its scales and shifts go with its rank rows."""
        self._adapters.release(adapter_slot)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`."""
        num_tokens, num_sequences = len(batch.token_ids), len(batch.seq_lens)
        num_rows = max(num_sequences, len(batch.sample_rows))  # prompts with log-probabilities have several each
        bucket, program = self.programs.find(num_tokens, num_rows, decode=num_tokens == num_sequences)
        flat = pack(batch, bucket, self._num_kv_slots, self._adapters.of_step(batch))
        self._kv, self._last = program(self._weights, self._tables, self._adapters.places(), self._kv, flat)
        return sample(self._last, batch.sampling)

    def logits(self, num_rows: int) -> NDArray[np.float32]:
        """The last step's logits [num_rows, vocab_size] (for tests)."""
        assert self._last is not None, "no step has run"
        return np.asarray(self._last.logits)[:num_rows]

    def trim_memory(self, *_: object) -> bool:
        """See `Backend.trim_memory`: the device's memory is reserved at start."""
        return False

    def close(self) -> None:
        """Stop compiling and release every array."""
        self.programs.stop()
        for name in ("_weights", "_kv", "_tables", "_last", "_writers", "_adapters"):
            if hasattr(self, name):
                delattr(self, name)

    def _compile(self, bucket: Bucket) -> Any:
        step = partial(forward, bucket=bucket, sizes=self._sizes, add_deltas=self._add_deltas)
        weights, tables, places, kv = self._argument_shapes
        run = sharding.over_shards(step, self._mesh, weights, self._row_specs, self._sizes)
        flat = sharding.shape_struct(self._mesh, (bucket.size,), sharding.REPLICATED, np.int32)
        return jax.jit(run, donate_argnums=(3,)).lower(weights, tables, places, kv, flat).compile()

    def _compile_writer(self, count: int) -> Any:
        """The program that writes an adapter of at most `count` rank rows."""
        shapes = jax.tree.map(_shape_of, self._tables)
        specs = self._row_specs._replace(experts=None)
        struct = partial(sharding.shape_struct, self._mesh)
        rows = jax.tree.map(struct, self._adapters.shapes(count), specs, is_leaf=_is_shape)
        start = struct((), sharding.REPLICATED, np.int32)
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        return jax.jit(write_rows, donate_argnums=(0,), out_shardings=shardings).lower(shapes, rows, start).compile()

    def _compile_page_writer(self) -> Any:
        """The program that writes pages of experts' rows; None without such pages."""
        if self._tables.experts is None:
            return None
        shapes = jax.tree.map(_shape_of, self._tables.experts)
        experts = self._adapters.experts
        struct = partial(sharding.shape_struct, self._mesh)
        rows = jax.tree.map(struct, experts.shapes(PAGES_AT_ONCE), experts.specs(), is_leaf=_is_shape)
        pages = struct((PAGES_AT_ONCE,), sharding.REPLICATED, np.int32)
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        return jax.jit(write_pages, donate_argnums=(0,), out_shardings=shardings).lower(shapes, rows, pages).compile()

    def _new_kv_memory(self, config: EngineConfig) -> KvMemory:
        sizes, attention = self._sizes, self._sizes.attention
        blocks = (sizes.num_layers, config.num_kv_blocks)
        if attention.latent is not None:
            shapes = KvMemory((*blocks, 1, config.block_size, attention.latent.width), None)
        else:
            shape = (*blocks, sizes.num_shards * sizes.kv_heads, config.block_size, attention.head_dim)
            shapes = KvMemory(shape, shape)
        memory: KvMemory = self._put(
            KvMemory(*(shape and np.zeros(shape, np.float32) for shape in shapes)), sharding.kv_specs(sizes)
        )
        return memory

    def _put(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(self._mesh, spec)), tree, specs)


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, allocate memory and compile. Raises ConfigError for an unavailable device or setting."""
    xla = config.section(XlaConfig)
    try:
        devices = jax.devices(xla.platform)
    except RuntimeError as error:
        raise ConfigError(
            f"engine.xla.platform is {xla.platform!r} but JAX has no such device here: {error}"
        ) from error
    mesh = sharding.make_mesh(devices, xla.tensor_parallel, xla.expert_parallel)
    return XlaBackend(checkpoint.spec, checkpoint.tensors(), config, mesh)


def lora_kernel(kernel_backend: str, platform: str) -> AddDeltas:
    """The LoRA kernel of a kernel backend. Raises ConfigError for a platform without such a kernel."""
    if kernel_backend == "xla":
        return add_deltas
    if platform not in ("cpu", "tpu"):
        raise ConfigError(
            f"engine.xla.kernel_backend is 'pallas', a kernel for TPUs, but engine.xla.platform is {platform!r}; set "
            "kernel_backend: xla"
        )
    if platform == "cpu":
        _LOGGER.warning("engine.xla.kernel_backend is 'pallas' on a CPU: its kernel is interpreted, which is slow")
    return partial(pallas.add_deltas, interpret=platform == "cpu")


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _is_shape(node: Any) -> bool:
    return type(node) is tuple


def _use_cache(folder: str) -> None:
    """Cache compiled programs in `folder`. JAX has one cache per process."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
