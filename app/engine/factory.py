"""Factory of engines: the one place that knows which engines and backends exist.

A backend's libraries are imported here when it is chosen, in the process that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from app.engine.adapters.features import CUDA_FEATURES, FEATURES, MERGEABLE_FEATURES, VLLM_FEATURES, XLA_FEATURES
from app.engine.backend import Backend
from app.engine.config import CpuConfig, CudaConfig, EngineConfig, VllmConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread, OnChunks, OnFailure
from app.engine.errors import CheckpointError, ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from app.engine.vllm.environment import found_vllm

if TYPE_CHECKING:  # llguidance is loaded by the first grammar
    from app.engine.structured_output.backend_guidance import Vocabulary


def create_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    on_chunks: OnChunks,
    on_failure: OnFailure | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineThread:
    """An engine that waits for `warm_up` and `start`. `clock` returns seconds, from any origin.

    Raises CheckpointError or ConfigError if the model or a setting does not fit this engine or machine.
    """
    if isinstance(config.device, VllmConfig):
        from app.engine.vllm.engine import open_engine

        return open_engine(checkpoint, config, on_chunks, on_failure, clock)
    return EngineThread(new_engine(checkpoint, config, clock), on_chunks, on_failure)


def compile_sampling(config: EngineConfig) -> None:
    """Compile the kernels of sampling before there is an engine, which would do it last; nothing but on the CPU."""
    if config.cpu is not None:
        from app.engine.cpu import outputs

        outputs.compile_sampling()


def new_engine(checkpoint: Checkpoint, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> Engine:
    """The engine without its thread. Raises CheckpointError, ConfigError, or an AdapterError of `merged_adapter`."""
    grammars = None if checkpoint.spec.encoder is not None else partial(load_vocabulary, checkpoint)
    merged = None
    if config.merged_adapter:
        from app.engine.adapters.formats.reading import read_adapter
        from app.engine.adapters.merge import merged_checkpoint
        from app.engine.adapters.paths import named_path

        path = named_path(config.merged_adapter)
        adapter = read_adapter(path, checkpoint.spec, supported_features=MERGEABLE_FEATURES)
        checkpoint, merged = merged_checkpoint(checkpoint, adapter), adapter.card
        config = config.model_copy(update={"lora_pool_rows": 0, "max_loras": 1})
    return Engine(load_backend(checkpoint, config), config, clock, grammars, merged)


def load_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """The vocabulary for structured output. Raises CheckpointError."""
    from app.engine.structured_output.backend_guidance import Vocabulary

    spec = checkpoint.spec
    return Vocabulary(load_tokenizer(checkpoint.tokenizer_source).to_json(), spec.vocab_size, spec.eos_token_ids)


def served_features(config: EngineConfig) -> frozenset[str]:
    """The `FEATURES` that the configured engine applies; adapters that need others are refused when they are read."""
    match config.device:
        case XlaConfig():
            return XLA_FEATURES
        case VllmConfig():
            return VLLM_FEATURES
        case CudaConfig():
            return CUDA_FEATURES
    return FEATURES


def check_device_is_here(config: EngineConfig) -> str:
    """What the device section finds on this machine, in words. Raises ConfigError for a GPU or a vLLM that is not here.
    Imports torch, for `engine.cuda` only."""
    if isinstance(config.device, VllmConfig):
        return found_vllm(config.device)
    if isinstance(config.device, CudaConfig):
        from app.engine.cuda import backend as cuda_backend

        cuda_backend.cuda_device(config.device.index)
    return f"engine.{config.device.name} is installed"


def load_backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    """The configured backend. CheckpointError or ConfigError if the model or a setting does not fit it or the host."""
    config.check_installed()
    if checkpoint.needs_vllm:
        raise CheckpointError(checkpoint.needs_vllm)
    if checkpoint.spec.encoder is not None and not isinstance(config.device, CpuConfig):
        raise ConfigError(
            f"{checkpoint.spec.name!r} is an encoder, which engine.{config.device.name} cannot compute; use engine.cpu"
        )
    if checkpoint.spec.has_gemma_arithmetic and not isinstance(config.device, CpuConfig):
        raise CheckpointError(
            f"models of family {checkpoint.spec.family!r} (soft caps, scaled embeddings, norms after each block) run "
            "with engine.cpu only"
        )
    match config.device:
        case CpuConfig():
            from app.engine.cpu.backend import CpuBackend
            from app.engine.cpu.encoder_backend import EncoderBackend

            kind = CpuBackend if checkpoint.spec.encoder is None else EncoderBackend
            return kind(checkpoint.spec, checkpoint.tensors(), config, checkpoint.tensors_digest)
        case CudaConfig():
            from app.engine.cuda import backend as cuda_backend

            return cuda_backend.load_backend(checkpoint, config)
        case XlaConfig():
            from app.engine.xla import backend as xla_backend

            return xla_backend.load_backend(checkpoint, config)
        case VllmConfig():
            raise ConfigError("engine.vllm computes in a process of its own, behind a service; use engine.cpu here")
