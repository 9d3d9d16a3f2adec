"""The JAX engine's backend: puts weights on devices, owns KV memory and adapter tables, calls programs.

In: a checkpoint's tensors and the engine's sizes. Out: a `Backend`. Every array is an argument of a pure
program; KV memory and tables are donated, so they are written in place. All programs, those that write adapters
included, are compiled before they are called: no adapter, rank or batch ever compiles anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig, WeightStorage, XlaConfig
from app.engine.errors import ConfigError
from app.engine.models.spec import ModelSpec
from app.engine.xla import cpu_tables, sharding, tables
from app.engine.xla.arrays import TENSOR_AXIS, KvMemory, Outcome
from app.engine.xla.cpu_tables import CpuAdapters
from app.engine.xla.decoder import forward
from app.engine.xla.huge_pages import use_huge_pages
from app.engine.xla.programs import Programs, cpu_ladder, ladder
from app.engine.xla.sampling import sample
from app.engine.xla.sizes import Form, sizes_of
from app.engine.xla.step import Bucket, pack
from app.engine.xla.tables import XlaAdapters, rank_classes
from app.engine.xla.weights import read_weights
from app.kernels.paged_attention.xla import blocks_per_group
from app.kernels.sgmv.xla import RANK_CHUNK


class JaxBackend:
    """Weights on one device or split over several, in float32; in the CPU form as `engine.xla.weight_storage` says."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[tuple[str, NDArray[Any]]], config: EngineConfig, mesh: Mesh
    ) -> None:
        """Raises CheckpointError for tensors that do not fit the spec, ConfigError for sizes that do not fit `mesh` and
        for a weight storage that the form does not have."""
        xla = config.section(XlaConfig)
        self._spec = spec
        self._mesh = mesh
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        self._sizes = sizes_of(spec, mesh.shape[TENSOR_AXIS], _form(xla, mesh), interpret=is_cpu)
        self._limits = BackendLimits(
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            adapter_rank_rows=config.adapter_rank_rows // RANK_CHUNK * RANK_CHUNK,
            rank_alignment=RANK_CHUNK,
            max_adapter_slots=config.max_adapter_slots,
            adapter_extra_bytes=config.adapter_extra_bytes,
            takes_bfloat16=self._sizes.form == "cpu",
        )
        self._num_kv_slots = config.num_kv_blocks * config.block_size
        if self._num_kv_slots >= 1 << 31:
            raise ConfigError(f"{self._num_kv_slots} KV slots do not fit 32-bit indices; lower engine.num_kv_blocks")
        if xla.compilation_cache_dir:
            _use_cache(xla.compilation_cache_dir)
        max_positions = min(spec.max_positions, config.max_context or spec.max_positions)
        weights = read_weights(spec, self._sizes, tensors, max_positions, _storage(xla, self._sizes.form))
        self._weights = self._put(weights, sharding.weight_specs(weights, self._sizes))
        kv_heads = self._sizes.num_shards * self._sizes.kv_heads
        blocks = (len(spec.layers), config.num_kv_blocks, kv_heads)
        values_shape = (*blocks, config.block_size, self._sizes.stored_dim)
        keys_shape = (*blocks, *reversed(values_shape[3:])) if self._sizes.form == "cpu" else values_shape
        self._kv = KvMemory(*(self._zeros(shape, sharding.KV_SPEC) for shape in (keys_shape, values_shape)))
        num_slots, samples = config.max_adapter_slots, config.max_batch_sequences
        self._adapters: CpuAdapters | XlaAdapters
        self._write_rows: Any
        if self._sizes.form == "cpu":
            self._adapters = CpuAdapters(spec, self._sizes, self._weights, num_slots, samples, mesh)
            self._write_rows = cpu_tables.write_rows
        else:
            extra_bytes = self._limits.adapter_extra_bytes if self._limits.adapter_rank_rows else 0
            self._adapters = XlaAdapters(spec, self._sizes, self._weights, num_slots, extra_bytes, mesh)
            self._write_rows = tables.write_rows
        self._row_specs = self._adapters.specs()
        self._rows = self._map_rows(self._zeros, self._limits.adapter_rank_rows)
        if is_cpu:
            _use_huge_pages((self._weights, self._kv, self._rows))
        self._table_shapes = jax.tree.map(_shape_of, self._adapters.tables(self._rows))
        num_blocks = min(-(-max_positions // config.block_size), config.num_kv_blocks)
        per_group = blocks_per_group(config.block_size)
        table_width = -(-num_blocks // per_group) * per_group
        if self._sizes.form == "cpu":
            buckets = cpu_ladder(config, table_width)
        else:
            decode_tile = 1 if self._sizes.heads > self._sizes.kv_heads else 2  # an attention product needs two rows
            buckets = ladder(config, table_width, decode_tile)
        self._classes = rank_classes(self._limits.adapter_rank_rows)
        self._writers: dict[int, Any] = {}
        start = time.perf_counter()
        if self._limits.adapter_rank_rows and not xla.skip_precompile:
            self._adapters.warm_up(self._rows)
        for count in () if xla.skip_precompile else self._classes:
            self._writers[count] = self._compile_writer(count)
        self.writers_compile_s = time.perf_counter() - start
        self.programs = Programs(buckets, self._compile, skip_precompile=xla.skip_precompile)
        self._last: Outcome | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """See `Backend.prepare_adapter`."""
        self._adapters.prepare(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """See `Backend.write_adapter`. Raises AdapterMismatch for a module this decoder does not have."""
        self._adapters.prepare(adapter)
        count = next(count for count in self._classes if count >= adapter.card.max_rank)
        if count not in self._writers:  # only with skip_precompile
            self._writers[count] = self._compile_writer(count)
        rows = self._adapters.assign(adapter_slot, row_start, adapter, count)
        if adapter.weights:
            self._rows = self._writers[count](self._rows, rows, np.int32(row_start))
        self._adapters.take_extras(adapter_slot, row_start, adapter, self._rows)

    def is_ready(self, adapter_slot: int) -> bool:  # noqa: ARG002
        """See `Backend.is_ready`: a write has ended when it returns."""
        return True

    def release_adapter(self, adapter_slot: int) -> None:
        """See `Backend.release_adapter`."""
        self._adapters.release(adapter_slot)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`."""
        num_tokens, num_sequences = len(batch.token_ids), len(batch.seq_lens)
        bucket, program = self.programs.find(num_tokens, num_sequences, decode=num_tokens == num_sequences)
        flat = pack(batch, bucket, self._num_kv_slots, self._adapters.fill)
        self._kv, self._last = program(self._weights, self._adapters.tables(self._rows), self._kv, flat)
        return sample(self._last, batch.sampling)

    def logits(self, num_rows: int) -> NDArray[np.float32]:
        """The last step's logits [num_rows, vocab_size] (tests read it)."""
        assert self._last is not None, "no step has run"
        return np.asarray(self._last.logits)[:num_rows]

    def hlo(self, bucket: Bucket) -> str:
        """The optimised program of a bucket as text (tests count its collectives)."""
        text = self.programs.program(bucket).as_text()
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        """Stop compiling and drop every array."""
        self.programs.stop()
        self._adapters.close()
        for name in ("_weights", "_kv", "_rows", "_last", "_writers", "_adapters"):
            if hasattr(self, name):
                delattr(self, name)

    def _compile(self, bucket: Bucket) -> Any:
        step = partial(forward, bucket=bucket, sizes=self._sizes)
        specs = jax.tree.map(lambda shape: shape.sharding.spec, self._table_shapes)
        run = sharding.over_shards(step, self._mesh, self._weights, specs, self._sizes)
        replicated = NamedSharding(self._mesh, sharding.REPLICATED)
        flat = jax.ShapeDtypeStruct((bucket.size,), np.int32, sharding=replicated)
        weights, kv = jax.tree.map(_shape_of, (self._weights, self._kv))
        return jax.jit(run, donate_argnums=(2,)).lower(weights, self._table_shapes, kv, flat).compile()

    def _compile_writer(self, count: int) -> Any:
        def described(shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(self._mesh, spec))

        start = described((), sharding.REPLICATED).update(dtype=np.int32)
        write = jax.jit(
            self._write_rows, donate_argnums=(0,), out_shardings=jax.tree.map(lambda array: array.sharding, self._rows)
        )
        shapes = jax.tree.map(_shape_of, self._rows)
        return write.lower(shapes, self._map_rows(described, count), start).compile()

    def _map_rows(self, make: Callable[[tuple[int, ...], jax.sharding.PartitionSpec], Any], num_rows: int) -> Any:
        """A tree like the rank rows', made of each table's shape and PartitionSpec."""
        shapes = self._adapters.shapes(num_rows)
        return jax.tree.map(
            make, shapes, self._row_specs, is_leaf=lambda node: type(node) is tuple and isinstance(node[0], int)
        )

    def _put(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(self._mesh, spec)), tree, specs)

    def _zeros(self, shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> jax.Array:
        return jax.device_put(np.zeros(shape, np.float32), NamedSharding(self._mesh, spec))


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _use_huge_pages(tree: Any) -> None:
    """For every array on this machine's CPUs."""
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            use_huge_pages(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)


def _form(xla: XlaConfig, mesh: Mesh) -> Form:
    """The configured form; ConfigError for one these devices cannot run."""
    platform = mesh.devices.flat[0].platform
    if xla.form == "auto":
        return "cpu" if platform == "cpu" else "xla"
    if xla.form == "cpu" and platform != "cpu":
        raise ConfigError(f"engine.xla.form is 'cpu' but the device is a {platform}; set auto")
    return xla.form


def _storage(xla: XlaConfig, form: Form) -> WeightStorage:
    """How base weights lie in memory; ConfigError for what the form cannot do."""
    if form == "cpu":
        return xla.weight_storage
    if xla.weight_storage == "int8":
        raise ConfigError(
            f"engine.xla.weight_storage is {xla.weight_storage!r} but the JAX engine's form {form!r} keeps float32 "
            "weights; set auto or float32, or on a CPU engine.xla.form: cpu"
        )
    return "float32"


def _use_cache(folder: str) -> None:
    """Keep every compiled program in `folder`. JAX has one cache per process."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
