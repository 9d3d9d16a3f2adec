"""Running engines of several kinds over one tiny model, and what their callers see."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.config import EngineConfig
from app.engine.engine_thread import EngineThread
from app.engine.errors import EngineFailure
from app.engine.factory import create_engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.linear_modules import target_shape
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from tests.engine.adapters.random_adapters import adapter_from_arrays
from tests.engine.checkpoints import tiny_model

FAKE_WORKER = Path(__file__).parent / "vllm" / "fake_worker.py"
MAX_LORAS, MAX_LORA_RANK, MAX_NUM_SEQS, MAX_QUEUED = 2, 16, 4, 16
#: Answers come from another process, on a machine that is busy with other tests.
WAIT_S = 120


def write_model(folder: Path) -> Path:
    """A tiny Llama in float32 that every engine can compute."""
    torch.manual_seed(11)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    tiny_model("llama", num_hidden_layers=2, num_key_value_heads=1, **sizes).save_pretrained(folder)  # type: ignore[operator]
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A token per printable character, for grammars: "!" is token 3."""
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "\u0120"]  # the last is how bytes spell a space
    backend = tokenizers.Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def vllm_python() -> str:
    """The interpreter of the environment that contains vLLM (docs/how-to/gpu.md says how to make it)."""
    python = os.environ.get("POLYLORA_VLLM_PYTHON")
    assert python, "POLYLORA_VLLM_PYTHON must name the interpreter of an environment that contains vLLM 0.32"
    return python


def vllm_section(kind: str, **extra: Any) -> dict[str, Any]:
    """engine.vllm for the fake or for vLLM itself."""
    sizes = {"max_loras": MAX_LORAS, "max_lora_rank": MAX_LORA_RANK, "dtype": "float32"}
    if kind == "fake":
        return {**sizes, "python": sys.executable, "worker": str(FAKE_WORKER), "extra_args": {"fake": extra}}
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}  # it compiles nothing on CPUs with LoRA
    return {**sizes, "python": vllm_python(), "extra_args": {**on_cpu, **extra}}


def engine_config(kind: str, **extra: Any) -> EngineConfig:
    """The same limits for each kind: "cpu", "fake" (a worker without a model) or "vllm"."""
    shared = {"max_num_seqs": MAX_NUM_SEQS, "max_queued_requests": MAX_QUEUED}
    if kind == "cpu":
        memory = {"num_kv_blocks": 64, "lora_pool_rows": MAX_LORAS * MAX_LORA_RANK, "max_loras": MAX_LORAS + 1}
        return EngineConfig.model_validate({**shared, **memory, "cpu": {"weight_dtype": "float32"}})
    return EngineConfig.model_validate({**shared, "vllm": vllm_section(kind, **extra)})


def make_adapter(spec: ModelSpec, seed: int, rank: int = 8, alpha: float | None = None) -> LoraAdapter:
    """A random adapter, large enough to change most tokens, on two modules of each layer."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in range(len(spec.layers)):
        for target in ("q_proj", "down_proj"):
            d_in, d_out = target_shape(spec, layer, target)
            a, b = rng.standard_normal((rank, d_in)), rng.standard_normal((d_out, rank))
            arrays[layer, target] = (a.astype(np.float32), (b * 0.3).astype(np.float32))
    return adapter_from_arrays(arrays, spec, alpha)


def ref_of(adapter: LoraAdapter, tenant_id: str = "a") -> AdapterRef:
    return AdapterRef("an-adapter", adapter.card.digest, tenant_id)


class Served:
    """A running engine and its callers."""

    def __init__(self, kind: str, folder: Path, config: EngineConfig | None = None, **extra: Any) -> None:
        self.kind = kind
        self.checkpoint = load_checkpoint(folder)
        self.spec = self.checkpoint.spec
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.ended: list[str] = []  # in the order of their last chunks
        self.failures: list[EngineFailure] = []
        self._changed = threading.Condition()
        self._num_requests = 0
        config = config or engine_config(kind, **extra)
        self.engine: EngineThread = create_engine(self.checkpoint, config, self._on_chunks, self._on_failure)
        self.engine.warm_up()
        self.engine.start()

    def _on_chunks(self, chunks: list[TokenChunk]) -> None:
        with self._changed:
            for chunk in chunks:
                before = self.chunks.setdefault(chunk.request_id, [])
                assert not before or before[-1].finish_reason is None, "a chunk after the last"
                before.append(chunk)
                if chunk.finish_reason is not None:
                    self.ended.append(chunk.request_id)
            self._changed.notify_all()

    def _on_failure(self, failure: EngineFailure) -> None:
        with self._changed:
            self.failures.append(failure)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=WAIT_S), (self.chunks, self.engine.stats())

    def submit(
        self,
        token_ids: tuple[int, ...],
        adapter: LoraAdapter | None = None,
        *,
        tenant_id: str = "a",
        resume: tuple[int, ...] = (),
        is_batch: bool = False,
        cache_salt: bytes = b"salt",
        **sampling: Any,
    ) -> str:
        """Submit a request, greedy and of eight tokens unless said otherwise; returns its id."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        ref = ref_of(adapter, tenant_id) if adapter is not None else None
        request = GenerateRequest(
            name, tenant_id, token_ids, params, ref, cache_salt=cache_salt, resume_token_ids=resume, is_batch=is_batch
        )
        self.engine.submit(request, adapter)
        return name

    def has_ended(self, name: str) -> bool:
        chunks = self.chunks.get(name)
        return bool(chunks) and chunks[-1].finish_reason is not None

    def num_ended_after(self, name: str, others: Sequence[str]) -> int:
        """How many of the others end later; waits for all of them."""
        for each in (name, *others):
            self.last(each)
        return sum(self.ended.index(other) > self.ended.index(name) for other in others)

    def last(self, name: str) -> TokenChunk:
        """A request's last chunk, once it has come."""
        self.wait(lambda: self.has_ended(name))
        return self.chunks[name][-1]

    def tokens(self, name: str) -> list[int]:
        """All tokens of a request that ended well."""
        last = self.last(name)
        assert last.error is None, last.error
        return [token_id for chunk in self.chunks[name] for token_id in chunk.token_ids]

    def answer(self, token_ids: tuple[int, ...], adapter: LoraAdapter | None = None, **options: Any) -> list[int]:
        return self.tokens(self.submit(token_ids, adapter, **options))

    def settle(self) -> None:
        """Wait until nothing runs."""
        self.wait(lambda: all(map(self.has_ended, list(self.chunks))))
        assert self.engine.stats().num_running == 0

    def residents(self) -> set[str]:
        return {resident.digest for resident in self.engine.stats().residents}
