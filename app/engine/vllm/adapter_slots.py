"""vLLM's adapter slots as the engine's tables: `app.engine.pools` decides who has a slot, this module tells vLLM.

A slot takes `max_lora_rank` rank rows of the pool, whatever an adapter's rank, so the pool, placement and pins count as
for other engines. Commands are sent one after the other, in order: vLLM loads between two of its steps, so at most
about one adapter is loaded per step. An integer id is never used twice, and an adapter's name in vLLM is its digest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import VllmConfig
from app.engine.errors import AdapterWriteFailed
from app.engine.models.spec import ModelSpec
from app.engine.vllm.lora_folder import LoraFolders
from app.engine.vllm.worker_process import Frame, WorkerProcess


class LoraName(NamedTuple):
    """What vLLM calls an adapter."""

    digest: str
    lora_id: int
    path: Path

    def frame(self) -> Frame:
        return {"name": self.digest, "lora_id": self.lora_id, "path": str(self.path)}


@dataclass(slots=True, eq=False)
class _Slot:
    digest: str
    loaded: Future[LoraName]


class AdapterSlots:
    """Implements `app.engine.backend.Backend` as far as the adapter loader uses it; vLLM computes by itself."""

    def __init__(
        self, spec: ModelSpec, config: VllmConfig, ready: Frame, process: WorkerProcess, wake: Callable[[], None]
    ) -> None:
        """`ready`: the worker's frame with vLLM's sizes. `wake` is called, on any thread, when a load has ended."""
        self.spec, self.compile_s = spec, 0.0
        self._process, self._wake = process, wake
        self._folders = LoraFolders(spec, config.max_lora_rank)
        self.limits = BackendLimits(
            num_kv_blocks=ready["num_kv_blocks"],
            block_size=ready["block_size"],
            lora_pool_rows=config.max_loras * config.max_lora_rank,
            rank_alignment=config.max_lora_rank,
            max_loras=config.max_loras + 1,
            extra_weights_bytes=1 << 62,  # so that the pool says when a slot is freed; folders are bounded by slots
            extra_bytes_of=lambda adapter: max(1, adapter.card.size_bytes),
            rank_rows_of=self._folders.check,
            can_embed=config.runner == "pooling",
        )
        self._max_idle = config.max_cpu_loras - config.max_loras if config.max_cpu_loras else 0
        self._slots: dict[int, _Slot] = {}
        self._idle: OrderedDict[str, Future[LoraName]] = OrderedDict()  # evicted, still in vLLM's host memory
        self._pinned: frozenset[str] = frozenset()
        self._pinned_in_vllm: set[str] = set()
        self._num_ids = self._num_calls = self.num_writes = 0
        self._calls: dict[int, Future[str | None]] = {}
        self._has_ended = False
        self._commands = ThreadPoolExecutor(1, "vllm-adapters")

    @property
    def num_calls(self) -> int:
        """Commands that vLLM has not answered."""
        return len(self._calls)

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        self._folders.check(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:  # noqa: ARG002
        """Start to load an adapter; `is_ready` says when vLLM has it."""
        digest = adapter.card.digest
        if (loaded := self._idle.pop(digest, None)) is None:
            self._num_ids += 1
            loaded = self._commands.submit(self._load, adapter, self._num_ids)
        else:  # vLLM copies it from host memory
            loaded = self._commands.submit(self._touch, loaded)
        self._slots[adapter_slot] = _Slot(digest, loaded)
        self.num_writes += 1
        loaded.add_done_callback(lambda _: self._wake())
        if digest in self._pinned:
            self._commands.submit(self._pin, loaded)

    def is_ready(self, adapter_slot: int) -> bool:
        if adapter_slot == 0:
            return True
        loaded = self._slots[adapter_slot].loaded
        return loaded.done() and loaded.result() is not None

    def name_of(self, adapter_slot: int) -> LoraName | None:
        """What vLLM calls the adapter in a ready slot; None for the base."""
        return None if adapter_slot == 0 else self._slots[adapter_slot].loaded.result()

    def loading(self, digest: str) -> Future[LoraName] | None:
        """The load of a resident adapter."""
        return next((slot.loaded for slot in self._slots.values() if slot.digest == digest), None)

    def release_adapter(self, adapter_slot: int) -> None:
        """Remove an evicted adapter, or leave it in vLLM's host memory while `max_cpu_loras` allows it."""
        slot = self._slots.pop(adapter_slot)
        is_loaded = slot.loaded.done() and slot.loaded.exception() is None
        if is_loaded and slot.digest not in self._pinned_in_vllm:
            self._idle[slot.digest] = slot.loaded
        else:
            self._commands.submit(self._remove, slot.digest, slot.loaded)
        while len(self._idle) > self._max_idle:
            self._commands.submit(self._remove, *self._idle.popitem(last=False))

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these in vLLM's own cache, too. It has no command that unpins; removing an adapter does."""
        new, self._pinned = frozenset(digests) - self._pinned, frozenset(digests)
        for slot in self._slots.values():
            if slot.digest in new:
                self._commands.submit(self._pin, slot.loaded)

    def on_done(self, frame: Frame) -> None:
        """vLLM has answered a command. Any thread."""
        if (answer := self._calls.pop(frame["call"], None)) is not None:
            answer.set_result(frame["error"])

    def fail(self) -> None:
        """The worker has ended: no command is answered any more. Any thread."""
        self._has_ended = True
        for call in list(self._calls):
            self.on_done({"call": call, "error": "vLLM has ended"})

    def forward(self, batch: ForwardBatch) -> ForwardOutput:  # noqa: ARG002
        raise AssertionError("vLLM computes its own batches")

    def trim_memory(self, *_: object) -> bool:
        """See `Backend.trim_memory`: vLLM's memory is its own."""
        return False

    def close(self) -> None:
        self._process.close()
        self.fail()
        self._commands.shutdown(cancel_futures=True)
        self._folders.close()

    def _call(self, kind: str, frame: Frame) -> str | None:
        """Send a command and wait for the answer: an error, or None."""
        self._num_calls += 1
        call, answer = self._num_calls, Future[str | None]()
        self._calls[call] = answer
        if self._has_ended:  # `fail` may not have seen this call
            self.fail()
        self._process.send({"type": kind, "call": call, **frame})
        return answer.result()

    def _load(self, adapter: LoraAdapter, lora_id: int) -> LoraName:
        digest = adapter.card.digest
        try:
            name = LoraName(digest, lora_id, self._folders.write(adapter))
        except OSError as error:
            raise AdapterWriteFailed(f"the adapter's folder for vLLM could not be written: {error}") from error
        try:
            self._add(name)
        except AdapterWriteFailed:
            self._folders.remove(digest)
            raise
        return name

    def _touch(self, before: Future[LoraName]) -> LoraName:
        name = before.result()
        self._add(name)
        return name

    def _add(self, name: LoraName) -> None:
        error = self._call("add_lora", name.frame())
        if error is not None:
            raise AdapterWriteFailed(f"vLLM did not load adapter {name.digest[:12]}…: {error}")

    def _pin(self, loaded: Future[LoraName]) -> None:
        if loaded.exception() is None:
            name = loaded.result()
            self._pinned_in_vllm.add(name.digest)
            self._call("pin_lora", {"lora_id": name.lora_id})

    def _remove(self, digest: str, loaded: Future[LoraName]) -> None:
        if loaded.exception() is None:
            self._call("remove_lora", {"lora_id": loaded.result().lora_id})
            self._pinned_in_vllm.discard(digest)
            self._folders.remove(digest)
