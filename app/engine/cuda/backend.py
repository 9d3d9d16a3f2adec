"""The CUDA engine's backend: owns a device's memory, sends steps to it and reads tokens back.

Steps in which every sequence has one token replay CUDA graphs. Other steps, and those whose adapters have extra
weights, are launched operation by operation. Adapters are written in the background (`adapters`).

`device` may be any torch device. The tests run on the CPU with kernels of their own and without streams; everything
else is the same code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import Backend, BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import CudaConfig, EngineConfig
from app.engine.cuda.adapters import AdapterTables
from app.engine.cuda.decoder import CudaDecoder, KvMemory
from app.engine.cuda.extra_weights import CudaExtras, ExtraRows
from app.engine.cuda.graphs import Bucket, DecodeGraphs, batch_sizes, rank_bounds
from app.engine.cuda.kernels import TRITON, Kernels
from app.engine.cuda.memory import plan_memory
from app.engine.cuda.sampling import sample
from app.engine.cuda.step import Step, StepShape, StepVector
from app.engine.cuda.weights import load_weights
from app.engine.errors import AdapterTooLarge, ConfigError, OutOfDeviceMemory
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.linear_modules import shared_table_modules, stacked_modules
from app.engine.models.spec import ModelSpec

_LOGGER = logging.getLogger(__name__)
#: Memory that the host counts as when it is the device.
_UNBOUNDED = 1 << 44


class CudaBackend:
    """Weights, KV blocks and LoRA tables in one device's memory."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, NDArray[Any]]],
        config: EngineConfig,
        device: torch.device,
        kernels: Kernels = TRITON,
    ) -> None:
        """Raises CheckpointError for tensors that do not fit the spec, OutOfDeviceMemory for sizes that do not fit."""
        self._modules = shared_table_modules(stacked_modules(spec))
        self.spec = spec
        self._device = device
        cuda = config.section(CudaConfig)
        self._batch_invariant = cuda.batch_invariant
        dtype = getattr(torch, cuda.dtype)
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (_UNBOUNDED, _UNBOUNDED)
        self.plan = plan_memory(spec, config, device_bytes=total, free_bytes=free, element_bytes=dtype.itemsize)
        _LOGGER.info("%s on %s: %s", spec.name, device, self.plan)
        self.limits = BackendLimits(
            num_kv_blocks=self.plan.num_kv_blocks,
            block_size=config.block_size,
            lora_pool_rows=self.plan.lora_pool_rows,
            rank_alignment=1,
            max_loras=config.max_loras,
            extra_weights_bytes=config.extra_weights_bytes,
        )
        max_positions = min(spec.max_positions, config.max_model_len or spec.max_positions)
        self._table_width = min(-(-max_positions // config.block_size), self.plan.num_kv_blocks)
        self._kernels = kernels
        try:
            self._weights = load_weights(spec, tensors, max_positions, device, dtype)
            self._tables = AdapterTables(spec, self.plan.lora_pool_rows, config.max_loras, device, dtype)
            self.limits = replace(self.limits, rank_rows_of=self._tables.num_rows)
            self._kv = _kv_memory(spec, self.plan.num_kv_blocks, config.block_size, device, dtype)
            self._decoder = CudaDecoder(
                spec, self._weights, self._tables, self._kv, self._kernels, max_positions,
                batch_invariant=cuda.batch_invariant,
            )  # fmt: skip
            self._extras = CudaExtras(spec, self._weights, kernels.dora_scale)
            sizes = batch_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
            tokens, sequences = config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens)
            most = self._kernels.max_segments(max(tokens, sizes[-1]), max(tokens, sizes[-1]), 1)
            largest = StepShape(max(tokens, sizes[-1]), max(sequences, sizes[-1]), most, self._table_width)
            num_kv_slots = self.plan.num_kv_blocks * config.block_size
            self._vector = StepVector(device, largest, num_kv_slots)
            self._decode_tables = torch.zeros(sizes[-1], self._table_width, dtype=torch.int32, device=device)
            self.graphs = DecodeGraphs(sizes, rank_bounds(self.plan.lora_pool_rows), self._run_bucket, device)
            self._bucket_logits = torch.zeros(sizes[-1], spec.vocab_size, device=device)
            self._logits = self._bucket_logits[:0]
            if not cuda.skip_precompile:
                self.graphs.capture_all()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    @property
    def compile_s(self) -> float:
        """See `Backend.compile_s`: capturing graphs and compiling their kernels."""
        return self.graphs.capture_s

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """See `Backend.prepare_adapter`."""
        self._tables.check(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """See `Backend.write_adapter`; returns before the rows are written.

        Raises AdapterMismatch for a module that the decoder does not have, AdapterTooLarge if the device has no room
        for the adapter's extra weights.
        """
        self._tables.check(adapter)
        try:
            with self._on_device():
                self._extras.write(adapter_slot, adapter)
                self._tables.write(adapter_slot, row_start, adapter)
        except torch.OutOfMemoryError as error:
            self._extras.release(adapter_slot)
            raise AdapterTooLarge(
                f"adapter {adapter.card.digest[:12]} holds {adapter.card.extra_bytes} bytes besides its rank rows and "
                f"{self._device} has no room for them ({self.plan}); lower engine.cuda.gpu_memory_utilization or "
                "engine.num_kv_blocks"
            ) from error

    def is_ready(self, adapter_slot: int) -> bool:
        """See `Backend.is_ready`."""
        return self._tables.is_ready(adapter_slot)

    def release_adapter(self, adapter_slot: int) -> None:
        """See `Backend.release_adapter`."""
        self._extras.release(adapter_slot)
        with self._on_device():
            self._tables.release(adapter_slot)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`. Raises OutOfDeviceMemory, AdapterWriteFailed."""
        with torch.inference_mode(), self._on_device():
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        self._tables.wait(batch.run_adapter_slots)
        max_rank = int(self._tables.max_ranks[batch.run_adapter_slots].max(initial=0))
        runs = self._extras.runs(batch.run_starts, batch.run_adapter_slots)
        bucket = None
        if len(batch.token_ids) == len(batch.seq_lens) and not runs:
            bucket = self.graphs.bucket(len(batch.seq_lens), max_rank)
        try:
            if bucket is not None:
                self._logits = self._replay(bucket, batch)
            else:
                self._logits = self._launch(batch, max_rank, runs)
            return sample(self._logits, batch.sampling, self._kernels.exp)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    def logits(self, num_rows: int) -> NDArray[np.float32]:
        """The last step's logits [num_rows, vocab_size]; valid until the next step (for tests)."""
        logits: NDArray[np.float32] = self._logits[:num_rows].cpu().numpy()
        return logits

    def trim_memory(self, *_: object) -> bool:
        """See `Backend.trim_memory`: the device's memory is reserved at start."""
        return False

    def close(self) -> None:
        """Stop the threads and release every tensor."""
        if hasattr(self, "_tables"):
            self._tables.close()
        for name in (
            "graphs",
            "_decoder",
            "_extras",
            "_weights",
            "_kv",
            "_tables",
            "_vector",
            "_logits",
            "_bucket_logits",
            "_decode_tables",
        ):
            if hasattr(self, name):
                delattr(self, name)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _on_device(self) -> AbstractContextManager[object]:
        """Make this backend's device the calling thread's: kernels are launched on that one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _replay(self, bucket: Bucket, batch: ForwardBatch) -> torch.Tensor:
        """Run a decode step through its graph; returns logits [P, V]."""
        num_sequences, width = batch.block_tables.shape
        shape, block_tokens = self._bucket_shape(bucket, width)
        views = self._vector.send(batch, shape, self._segments(batch, block_tokens))
        self._decode_tables[:num_sequences, :width].copy_(views["block_tables"][:num_sequences])
        self.graphs.replay(bucket)
        if len(batch.sample_rows) == num_sequences:
            return self._bucket_logits[:num_sequences]
        return self._bucket_logits[torch.from_numpy(batch.sample_rows).to(self._device)]

    def _run_bucket(self, bucket: Bucket) -> None:
        """The step that a graph captures: decoding over the step vector and the decode tables."""
        with torch.inference_mode():
            shape, block_tokens = self._bucket_shape(bucket, 0)
            views = self._vector.views(shape)
            views["block_tables"] = self._decode_tables[: bucket.num_sequences]
            step = Step(**views, max_query_len=1, max_rank=bucket.max_rank, block_tokens=block_tokens)
            self._decoder.logits(self._decoder.hidden_states(step), self._bucket_logits[: bucket.num_sequences])

    def _launch(self, batch: ForwardBatch, max_rank: int, runs: list[tuple[int, int, Any]]) -> torch.Tensor:
        """Launch a step operation by operation; returns logits [P, V]."""
        num_tokens = len(batch.token_ids)
        block_tokens = self._block_tokens(num_tokens, max_rank, is_decode=num_tokens == len(batch.seq_lens))
        segments = self._segments(batch, block_tokens)
        shape = StepShape(num_tokens, len(batch.seq_lens), len(segments), batch.block_tables.shape[1])
        step = Step(
            **self._vector.send(batch, shape, segments),
            max_query_len=int(np.diff(batch.query_starts).max()),
            max_rank=max_rank,
            block_tokens=block_tokens,
        )
        extras = ExtraRows(runs, batch.sample_rows, self._modules, self._decoder.multiply) if runs else None
        hidden = self._decoder.hidden_states(step, extras)
        sampled = hidden[torch.from_numpy(batch.sample_rows).to(self._device)]
        logits = torch.empty(len(sampled), self.spec.vocab_size, device=self._device)
        if len(sampled):
            self._decoder.logits(sampled, logits, extras)
        return logits

    def _bucket_shape(self, bucket: Bucket, table_width: int) -> tuple[StepShape, int]:
        """The shape of a bucket's step and its tokens per segment."""
        size = bucket.num_sequences
        block_tokens = self._block_tokens(size, bucket.max_rank, is_decode=True)
        num_segments = self._kernels.max_segments(size, size, block_tokens) if block_tokens else 0
        return StepShape(size, size, num_segments, table_width), block_tokens

    def _block_tokens(self, num_tokens: int, max_rank: int, *, is_decode: bool) -> int:
        """Tokens per segment; 0 if tokens are computed one by one or have no adapters."""
        if not max_rank or (is_decode and not self._batch_invariant):
            return 0
        return self._kernels.block_tokens(num_tokens, batch_invariant=self._batch_invariant)

    def _segments(self, batch: ForwardBatch, block_tokens: int) -> NDArray[np.int32]:
        """[G, 3]: the batch's runs cut into pieces of `block_tokens` tokens; empty for tokens computed one by one."""
        if not block_tokens:
            return np.zeros((0, 3), np.int32)
        found: NDArray[np.int32] = self._kernels.segments(batch.run_starts, batch.run_adapter_slots, block_tokens)
        return found

    def _out_of_memory(self, error: Exception) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"{self._device} ran out of memory ({error}); the plan was: {self.plan}; lower "
            "engine.cuda.gpu_memory_utilization, engine.num_kv_blocks, lora_pool_rows or max_num_batched_tokens"
        )


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """Read the weights, plan and allocate memory, capture graphs. Raises ConfigError for an unavailable device or
    setting.
    """
    device = cuda_device(config.section(CudaConfig).index)
    torch.cuda.set_device(device)
    return CudaBackend(checkpoint.spec, checkpoint.tensors(), config, device)


def cuda_device(index: int) -> torch.device:
    """The GPU with this index. Raises ConfigError that names what is missing."""
    if not torch.backends.cuda.is_built():
        raise ConfigError(
            f"engine.cuda is set but torch {torch.__version__} was built without CUDA; install a CUDA build of torch, "
            "or leave engine.cuda out"
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise ConfigError(
            "engine.cuda is set but torch finds no CUDA device here; check the driver, or leave engine.cuda out"
        )
    if index >= count:
        raise ConfigError(f"engine.cuda.index is {index} but there are {count} CUDA devices, 0 to {count - 1}")
    return torch.device("cuda", index)


def _kv_memory(spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype) -> KvMemory:
    def empty(num_heads: int, width: int) -> torch.Tensor:
        return torch.zeros(num_blocks, num_heads, block_size, width, dtype=dtype, device=device)

    every = [layer.attention for layer in spec.layers]
    latents = [attention.latent for attention in every if attention.latent is not None]
    if latents:
        return KvMemory([empty(1, latent.width) for latent in latents], [])
    keys, values = ([empty(one.num_kv_heads, one.head_dim) for one in every] for _ in range(2))
    return KvMemory(keys, values)
