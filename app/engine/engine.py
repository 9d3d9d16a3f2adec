"""The engine: requests in, tokens out, without Ray and without HTTP.

Any thread submits, aborts, loads and unloads through an inbox; one thread calls `step()`, which returns that step's
chunks. A step does no I/O, awaits nothing and takes no lock. After a failure or a shutdown nothing is computed: every
stream and every adapter command, including later ones, ends with an `EngineFailure`. The scheduler chooses what a step
computes, the adapter loader keeps the device's tables up to date, and the backend computes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterCard, AdapterRef, is_activated
from app.engine.backend import Backend, BackendLimits
from app.engine.batch import ForwardOutput
from app.engine.batch_builder import BatchBuilder
from app.engine.config import EngineConfig
from app.engine.errors import (
    AdapterWriteFailed,
    ConfigError,
    EngineFailure,
    InvalidRequest,
    PolyloraError,
    QueueFull,
)
from app.engine.meter import EngineMeter
from app.engine.models.spec import ModelSpec
from app.engine.pools.adapter_commands import AdapterCommands, LoadCommand, UnloadCommand, refuse
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.request_validation import RequestValidator
from app.engine.scheduling.adapter_loader import AdapterLoader
from app.engine.scheduling.chunked_prefill import PrefillBudget
from app.engine.scheduling.fair_limiter import SharedFairLimiter
from app.engine.scheduling.schedule import Schedule
from app.engine.scheduling.scheduler import Scheduler
from app.engine.scheduling.tenant_isolation import TenantIsolation
from app.engine.sequence import Sequence
from app.engine.spec_decode.spec_decoder import SpecDecoder
from app.engine.stats import EngineStats, TenantService
from app.engine.structured_output.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:  # llguidance is loaded by the first grammar
    from app.engine.structured_output.backend_guidance import Vocabulary


class _Submit(NamedTuple):
    sequence: Sequence


class _Refuse(NamedTuple):
    request_id: str
    error: PolyloraError


class _Abort(NamedTuple):
    request_id: str


class _RefuseWaiting(NamedTuple):
    request_id: str
    error: QueueFull


class _Pin(NamedTuple):
    digests: Collection[str]


class _RemoteService(NamedTuple):
    served: Mapping[str, float]
    continues: bool


def max_model_len_of(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence in tokens. Raises ConfigError if a setting does not fit this model."""
    if config.max_model_len > spec.max_positions:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len} but model {spec.name!r} has "
            f"{spec.max_positions} positions; lower it, or set 0 for the model's own limit"
        )
    longest = config.max_model_len or spec.max_positions
    if spec.encoder is not None and config.max_num_batched_tokens < longest:
        raise ConfigError(
            f"engine.max_num_batched_tokens is {config.max_num_batched_tokens} but an encoder computes a text in one "
            f"step, and {spec.name!r} takes up to {longest} tokens; raise it, or lower engine.max_model_len"
        )
    return longest


def _check_speculation(config: EngineConfig, backend: Backend) -> None:
    if isinstance(config.speculative_decoding, int) and not backend.limits.num_draft_rows:
        raise ConfigError(
            f"engine.speculative_decoding is {config.speculative_decoding}, but this engine cannot verify draft tokens "
            f"for {backend.spec.name!r}; set auto or off"
        )


def _scheduler(
    kind: type[Scheduler],
    config: EngineConfig,
    limits: BackendLimits,
    blocks: BlockPool,
    adapters: AdapterPool,
    meter: EngineMeter,
) -> Scheduler:
    spec_decoder = SpecDecoder(
        config.speculative_decoding,
        blocks,
        meter,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_draft_rows=limits.num_draft_rows,
    )
    return kind(
        blocks, adapters, meter, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs,
        max_write_bytes=config.lora_load_bytes_per_step, prefill_budget=PrefillBudget(config.target_step_ms / 1000),
        tenant_isolation=TenantIsolation(config.max_tenant_slowdown), spec_decoder=spec_decoder,
    )  # fmt: skip


class Engine:
    """One base model, its KV memory and adapter tables, and the requests that share them."""

    #: What decides which sequences a step has.
    scheduler_kind: ClassVar[type[Scheduler]] = Scheduler

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Callable[[], Vocabulary] | None = None,
        merged: AdapterCard | None = None,
    ) -> None:
        """`grammars` loads the vocabulary for structured output; without it such requests are refused. `merged`: the
        adapter that is part of the backend's weights and the only one served; its requests are computed like the base
        model's."""
        self._backend, self._device_name = backend, config.device.name
        self.spec = backend.spec
        limits = backend.limits
        _check_speculation(config, backend)
        self.max_model_len = max_model_len_of(config, self.spec)
        self._meter = EngineMeter()
        self._blocks = BlockPool(limits.num_kv_blocks, limits.block_size, share=config.enable_prefix_caching)
        self._adapters = AdapterPool(
            limits.lora_pool_rows, limits.rank_alignment, limits.max_loras, limits.extra_weights_bytes,
            config.lora_eviction_policy,
        )  # fmt: skip
        self._check = RequestValidator(
            self.spec, self._adapters.limits, limits, merged, self.max_model_len, has_grammars=grammars is not None
        )
        self._clock = clock
        self._scheduler = _scheduler(self.scheduler_kind, config, limits, self._blocks, self._adapters, self._meter)
        self._compiler = GrammarCompiler(grammars, self._on_compiled) if grammars is not None else None
        self._builder = BatchBuilder(limits.block_size, self._compiler.masks if self._compiler is not None else None)
        #: Called on any thread when there is work that did not come from a call of this class (a compiled grammar).
        self.on_work: Callable[[], None] = lambda: None
        self._inbox: deque[
            _Submit | _Refuse | _Abort | _RefuseWaiting | _Pin | _RemoteService | UnloadCommand | LoadCommand
        ] = deque()
        self._live_ids: dict[str, object] = {}  # submitted, not ended; used by atomic single operations only
        self._waiting = SharedFairLimiter[str]("engine.max_queued_requests", config.max_queued_requests)
        self._commands = AdapterCommands(self._adapters, limits.extra_bytes_of, limits.rank_rows_of)
        self._writer = AdapterLoader(backend, self._adapters, self._commands, self._scheduler.live, self._meter, clock)
        self.merged = merged
        self._failure: EngineFailure | None = None
        self._schedule: Schedule | None = None  # of the current step, or of the last one

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """Queue a request; later steps return its chunks. Any thread, like all methods up to `stats`.

        Raises InvalidRequest (ContextOverflow), AdapterTooLarge, AdapterMismatch, QueueFull or EngineFailure; then
        nothing was queued. `adapter` holds the weights of `request.adapter`; an activated LoRA that the prompt does not
        invoke is not used. If the queue is full, the newest request of the tenant with the most in it ends with
        QueueFull in favour of a tenant with fewer. A resumed request is outside this limit, so it is never refused and
        never gives way: its client has already read part of the answer.
        """
        if self._failure is not None:
            raise self._failure
        self._check.request(request, adapter)
        if self.merged is not None:
            adapter = None  # merged into the weights
        elif adapter is not None and not is_activated(request.token_ids, adapter.card.invocation_tokens):
            request, adapter = replace(request, adapter=None, unactivated=request.adapter), None
        if adapter is not None and not self._adapters.is_resident(adapter.card.digest):
            self._backend.prepare_adapter(adapter)  # if it is evicted before it runs, the write prepares it
        sequence = Sequence(request, adapter, self.spec, self._blocks.block_size)
        sequence.submitted_s = self._clock()
        if adapter is not None:
            limits = self._backend.limits
            sequence.num_rank_rows_needed = limits.rank_rows_of(adapter)
            sequence.extra_bytes = limits.extra_bytes_of(adapter)
        if self._live_ids.setdefault(request.request_id, sequence) is not sequence:
            raise InvalidRequest(f"request_id {request.request_id!r} is already in use", param="request_id")
        if not request.resume_token_ids:
            try:
                gave_way = self._waiting.add(request.request_id, request.tenant_id)
            except QueueFull:
                del self._live_ids[request.request_id]
                raise
            for other, error in gave_way:
                self._inbox.append(_RefuseWaiting(other, error))
        if request.sampling.grammar and self._compiler is not None:
            self._compiler.submit(sequence)
        else:
            self._inbox.append(_Submit(sequence))
        if self._failure is not None and self._live_ids.pop(request.request_id, None) is not None:
            raise self._failure  # it failed in the meantime, and no step ended this request

    def abort(self, request_id: str) -> None:
        """See `EngineThread.abort`."""
        self._inbox.append(_Abort(request_id))

    def unload_adapter(self, digest: str) -> Future[int]:
        """See `EngineThread.unload_adapter`; EngineFailure if the engine has stopped or stops first."""
        freed: Future[int] = Future()
        self._enqueue(UnloadCommand(digest, freed))
        return freed

    def pin_adapters(self, digests: Collection[str]) -> None:
        """See `EngineThread.pin_adapters`; in effect from the next step on."""
        self._inbox.append(_Pin(frozenset(digests)))

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Pass the service that other replicas gave to waiting tenants to the fair queue, in the next step."""
        self._inbox.append(_RemoteService(served, continues))

    def service(self) -> TenantService:
        """See `EngineThread.service`."""
        return self._scheduler.queue.service()

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """See `EngineThread.load_adapter`; it is written as soon as running sequences leave it room."""
        self._check.adapter(adapter, ref.name)
        resident: Future[int] = Future()
        if self.merged is not None:
            resident.set_result(0)
            return resident
        self._backend.prepare_adapter(adapter)
        self._enqueue(LoadCommand(adapter, ref, resident))
        return resident

    def _enqueue(self, command: UnloadCommand | LoadCommand) -> None:
        self._inbox.append(command)
        if self._failure is not None:
            self._refuse_inbox(self._failure)  # no step will read it

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        num_compiling = self._compiler.num_waiting if self._compiler is not None else 0
        return bool(self._inbox) or len(self._live_ids) > num_compiling or self._writer.has_work

    @property
    def max_rank(self) -> int:
        """The largest rank that an adapter may have here, whichever modules it changes; 0 without rank rows."""
        return self._adapters.limits.max_rank

    @property
    def can_embed(self) -> bool:
        """Whether requests may ask for an embedding."""
        return self._backend.limits.can_embed

    @property
    def only_embeds(self) -> bool:
        """Whether every request has to ask for an embedding."""
        return self.spec.encoder is not None

    @property
    def failure(self) -> EngineFailure | None:
        """See `EngineThread.failure`."""
        return self._failure

    @property
    def computing(self) -> list[str]:
        """Ids of the requests in the current step, or in the last one."""
        schedule = self._schedule
        return [] if schedule is None else [sequence.request_id for sequence, _ in schedule.items]

    def stats(self) -> EngineStats:
        """See `EngineThread.stats`."""
        return self._meter.stats(
            self._blocks, self._adapters, num_live=len(self._live_ids), num_running=self._scheduler.num_running,
            merged=self.merged, service_gap=self._scheduler.queue.gap(), compile_s=self._backend.compile_s,
            engine=self._device_name,
        )  # fmt: skip

    # Everything below runs on the engine's thread.

    def step(self) -> list[TokenChunk]:
        """Read the inbox, compute one batch and return its chunks."""
        if self._failure is not None:
            return self._refuse_all(self._failure)
        self._schedule = None
        self._meter.now_s = self._clock()
        try:
            chunks = self._drain_inbox()
            self._schedule = self._scheduler.schedule()
            self._waiting.release(*self._schedule.admitted_ids)
            self._schedule, refused = self._writer.apply(self._schedule)
            output = self._forward(self._schedule)
            self._meter.now_s = self._clock()
            chunks += refused + self._scheduler.commit(self._schedule, output)
        except Exception as error:
            return self._fail(error)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._waiting.release(chunk.request_id)
                self._live_ids.pop(chunk.request_id, None)
        return chunks

    def shut_down(self, reason: EngineFailure) -> list[TokenChunk]:
        """Stop for good; returns the last chunk of every live request. `close` releases the memory."""
        if self._failure is None:
            self._failure = reason
        return self._refuse_all(self._failure)

    def close(self) -> None:
        """Release the device's memory. No step may follow."""
        if self._compiler is not None:
            self._compiler.close()
        self._backend.close()

    def trim_memory(self, should_stop: Callable[[], bool], *, keeps_prefixes: bool) -> bool:
        """Give back memory without prefix or adapter while nothing runs; see `Backend.trim_memory`."""
        rows = [(each.row_start, each.row_start + each.num_rows) for each in self._adapters.residents()]
        return self._backend.trim_memory(self._blocks.used_blocks(keeps_prefixes=keeps_prefixes), rows, should_stop)

    def check(self) -> None:
        """Assert that every block, row, reference and request is accounted for; for tests, between steps."""
        self._scheduler.check()

    def _drain_inbox(self) -> list[TokenChunk]:
        """Handle all messages and advance the adapter commands; returns the chunks of requests that this ended."""
        chunks: list[TokenChunk] = []
        for _ in range(len(self._inbox)):
            message = self._inbox.popleft()
            chunk: TokenChunk | None = None
            match message:
                case _Submit(sequence):
                    chunk = self._scheduler.add(sequence)
                case _Refuse(request_id, error):
                    chunk = TokenChunk(request_id, finish_reason="error", error=error)
                case _Abort(request_id):
                    chunk = self._abort(request_id)
                case _RefuseWaiting(request_id, error):
                    chunk = self._refuse_waiting(request_id, error)
                case _Pin(digests):
                    self._adapters.pin(digests)
                    self._scheduler.live.reopen()
                case _RemoteService(served, continues):
                    self._scheduler.queue.add_remote_service(served, continues=continues)
                case UnloadCommand() | LoadCommand():
                    self._commands.add(message)
            if chunk is not None:
                chunks.append(chunk)
        self._commands.settle(self._scheduler.live.num_of)
        return chunks

    def _on_compiled(self, sequence: Sequence, error: PolyloraError | None) -> None:
        """Queue a sequence whose grammar is compiled, or refuse it. Called on the compiler's thread."""
        self._inbox.append(_Submit(sequence) if error is None else _Refuse(sequence.request_id, error))
        self.on_work()

    def _abort(self, request_id: str) -> TokenChunk | None:
        if self._compiler is not None and self._compiler.cancel(request_id):
            return TokenChunk(request_id, finish_reason="abort")
        return self._scheduler.live.end(request_id, "abort")

    def _refuse_waiting(self, request_id: str, error: QueueFull) -> TokenChunk | None:
        """End a request in favour of another tenant's; None if it was admitted meanwhile, so that it stays."""
        if self._compiler is not None and self._compiler.cancel(request_id):
            return TokenChunk(request_id, finish_reason="error", error=error)
        return self._scheduler.live.end_new(request_id, error)

    def _forward(self, schedule: Schedule) -> ForwardOutput | None:
        """Compute the step.

        None if there is nothing to compute, or if an adapter write that the step waited for failed: the next step ends
        that adapter's requests and computes the others.
        """
        if not schedule.items:
            return None
        started_s = self._clock()
        try:
            output = self._backend.forward(self._builder.build(schedule.items))
        except AdapterWriteFailed:
            return None
        finally:
            if self._compiler is not None:
                self._compiler.wait_for_masks()
        took_s = self._clock() - started_s
        self._meter.observe_step(schedule.items, took_s)
        self._scheduler.observe(schedule, took_s)
        return output

    def _fail(self, error: Exception) -> list[TokenChunk]:
        """Stop for good: after an exception the state of the device and of the pools is unknown."""
        failure = EngineFailure(f"the engine stopped: {type(error).__name__}: {error}", computing=self.computing)
        failure.__cause__ = error
        self._failure = failure
        return self._refuse_all(failure)

    def _refuse_all(self, failure: EngineFailure) -> list[TokenChunk]:
        """End every live or arriving request and command with the failure."""
        self._refuse_inbox(failure)
        self._commands.refuse_all(failure)
        return [
            TokenChunk(request_id, finish_reason="error", error=failure)
            for request_id in self._live_ids.copy()
            if self._live_ids.pop(request_id, None) is not None
        ]

    def _refuse_inbox(self, failure: EngineFailure) -> None:
        """Fail the commands in the inbox. Any thread, once no step reads it; the thread that pops one answers it."""
        with contextlib.suppress(IndexError):  # another thread popped the last one
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, UnloadCommand | LoadCommand):
                    refuse(message, failure)
