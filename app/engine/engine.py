"""Requests in, tokens out.

In: submits, aborts and orders about adapters from any thread, through an inbox. Out: one list of chunks per
`step()`, which one thread calls. A step does no I/O, awaits nothing and takes no lock. Once the backend has
failed, or the engine was shut down, nothing is computed any more: every stream and every adapter order,
including those that come later, ends with an `EngineFailure`. The scheduler chooses what a step computes,
the adapter writer keeps the device's tables, and the backend computes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

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
from app.engine.meter import EngineMeter, StepProfile
from app.engine.models.spec import ModelSpec
from app.engine.pools.adapter_commands import AdapterCommands, LoadCommand, UnloadCommand, refuse
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.request_validation import RequestValidator
from app.engine.scheduling.adapter_loader import AdapterLoader
from app.engine.scheduling.chunked_prefill import PrefillBudget
from app.engine.scheduling.schedule import Schedule
from app.engine.scheduling.scheduler import Scheduler
from app.engine.scheduling.tenant_isolation import TenantIsolation
from app.engine.sequence import Sequence
from app.engine.spec_decode.spec_decoder import SpecDecoder
from app.engine.stats import EngineStats, TenantService
from app.engine.structured_output.grammar_compiler import CompiledGrammars, GrammarCompiler


@dataclass(frozen=True, slots=True)
class _Submit:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Refuse:
    request_id: str
    error: PolyloraError


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Pin:
    digests: Collection[str]


@dataclass(frozen=True, slots=True)
class _RemoteService:
    served: Mapping[str, float]
    continues: bool


def max_model_len_of(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence in tokens. Raises ConfigError for settings that are not for this model."""
    if config.max_model_len > spec.max_positions:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len} but model {spec.name!r} has "
            f"{spec.max_positions} positions; lower it, or set 0 for the model's own limit"
        )
    longest = config.max_model_len or spec.max_positions
    if spec.encoder is not None and config.max_num_batched_tokens < longest:
        raise ConfigError(
            f"engine.max_num_batched_tokens is {config.max_num_batched_tokens} but an encoder computes a text in one step, and "
            f"{spec.name!r} takes up to {longest} tokens; raise it, or lower engine.max_model_len"
        )
    return longest


def _check_speculation(config: EngineConfig, backend: Backend) -> None:
    if isinstance(config.speculative_decoding, int) and not backend.limits.num_draft_rows:
        raise ConfigError(
            f"engine.speculative_decoding is {config.speculative_decoding}, but this engine cannot verify guessed tokens for "
            f"{backend.spec.name!r}; set auto or off"
        )


def _scheduler(
    config: EngineConfig, limits: BackendLimits, blocks: BlockPool, adapters: AdapterPool, meter: EngineMeter
) -> Scheduler:
    spec_decoder = SpecDecoder(
        config.speculative_decoding,
        blocks,
        meter,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_draft_rows=limits.num_draft_rows,
    )
    return Scheduler(
        blocks,
        adapters,
        meter,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_write_bytes=config.lora_load_bytes_per_step,
        prefill_budget=PrefillBudget(config.target_step_ms / 1000),
        tenant_isolation=TenantIsolation(config.max_tenant_slowdown),
        spec_decoder=spec_decoder,
    )


class Engine:
    """One base model, its KV memory and adapter tables, and the requests that share them."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Callable[[], CompiledGrammars] | None = None,
        merged: AdapterCard | None = None,
    ) -> None:
        """`grammars` loads what answers with a grammar need; without it they are refused. `merged`: the adapter that
        the backend's weights hold, and that alone is served; its requests are computed as the base's."""
        self._backend = backend
        self.spec = backend.spec
        limits = backend.limits
        _check_speculation(config, backend)
        self.max_model_len = max_model_len_of(config, self.spec)
        self._max_queued_requests = config.max_queued_requests
        self._meter = EngineMeter()
        self._split = StepProfile()
        self._blocks = BlockPool(limits.num_kv_blocks, limits.block_size, share=config.enable_prefix_caching)
        self._adapters = AdapterPool(
            limits.lora_pool_rows,
            limits.rank_alignment,
            limits.max_loras,
            limits.extra_weights_bytes,
            config.lora_eviction_policy,
        )
        self._check = RequestValidator(
            self.spec, self._adapters.limits, limits, merged, self.max_model_len, has_grammars=grammars is not None
        )
        self._clock = clock
        self._scheduler = _scheduler(config, limits, self._blocks, self._adapters, self._meter)
        self._compiler = GrammarCompiler(grammars, self._on_compiled) if grammars is not None else None
        self._builder = BatchBuilder(limits.block_size, self._compiler.masks if self._compiler is not None else None)
        #: Called on any thread when the engine has work that no submit has announced.
        self.on_work: Callable[[], None] = lambda: None
        self._inbox: deque[_Submit | _Refuse | _Abort | _Pin | _RemoteService | UnloadCommand | LoadCommand] = deque()
        self._live_ids: dict[str, object] = {}  # submitted and not ended; single operations only, they are atomic
        self._commands = AdapterCommands(self._adapters, limits.extra_bytes_of, limits.rank_rows_of)
        self._writer = AdapterLoader(backend, self._adapters, self._commands, self._scheduler.live, self._meter, clock)
        self.merged = merged
        self._failure: EngineFailure | None = None
        self._plan: Schedule | None = None  # of the present step, or of the last one

    # -- any thread ---------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """Queue a request; its chunks come out of later steps.

        Raises InvalidRequest (ContextOverflow), AdapterTooLarge, AdapterMismatch, QueueFull or EngineFailure;
        then nothing was queued. `adapter` holds the weights `request.adapter` refers to; one that the prompt does not
        activate takes no part. A resumed request is queued however many wait: its client has begun to read the answer.
        """
        if self._failure is not None:
            raise self._failure
        self._check.request(request, adapter)
        if self.merged is not None:
            adapter = None  # it is in the weights
        elif adapter is not None and not is_activated(request.token_ids, adapter.card.invocation_tokens):
            request, adapter = replace(request, adapter=None, unactivated=request.adapter), None
        num_waiting = len(self._live_ids) - self._scheduler.num_running
        if num_waiting >= self._max_queued_requests and not request.resume_token_ids:
            raise QueueFull(
                f"{num_waiting} requests are waiting and engine.max_queued_requests is {self._max_queued_requests}; try again later"
            )
        if adapter is not None and not self._adapters.is_resident(adapter.card.digest):
            self._backend.prepare_adapter(adapter)  # one that leaves before its turn is prepared when it is written
        sequence = Sequence(request, adapter, self.spec, self._blocks.block_size)
        if adapter is not None:
            limits = self._backend.limits
            sequence.num_needed, sequence.extra_bytes = limits.rank_rows_of(adapter), limits.extra_bytes_of(adapter)
        if self._live_ids.setdefault(request.request_id, sequence) is not sequence:
            raise InvalidRequest(f"request_id {request.request_id!r} is already in use", param="request_id")
        if request.sampling.grammar and self._compiler is not None:
            self._compiler.take(sequence)
        else:
            self._inbox.append(_Submit(sequence))
        if self._failure is not None and self._live_ids.pop(request.request_id, None) is not None:
            raise self._failure  # it failed meanwhile, and no step has answered for this request

    def abort(self, request_id: str) -> None:
        """End a request in the next step, with finish_reason "abort". One that has just ended is left alone."""
        self._inbox.append(_Abort(request_id))

    def unload_adapter(self, digest: str) -> Future[int]:
        """Free an adapter's rows once its last sequence has ended; the result is how many rows were freed.

        An adapter that is brought again before that stays, and no rows are freed. The future raises EngineFailure if
        the engine has stopped or stops before.
        """
        freed: Future[int] = Future()
        self._order(UnloadCommand(digest, freed))
        return freed

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Never evict these adapters, and no others, from the next step on, once they are resident, idle or not.

        Requests for adapters that they leave no room for end with NotReady.
        """
        self._inbox.append(_Pin(frozenset(digests)))

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Other replicas served tenants that wait here so much in all: `FairQueue.hear_elsewhere`, in the next step."""
        self._inbox.append(_RemoteService(served, continues))

    def service(self) -> TenantService:
        """What tenants were served here, and which of them wait, as of about now."""
        return self._scheduler.service()

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """Write an adapter before any request asks for it, as soon as sequences in flight leave it room.

        `ref` says whose it is. The future is done when the adapter is resident: so many bytes were written for it.
        Raises what `submit` raises for its adapter; the future may raise NotReady (pinned adapters leave no room),
        EngineFailure, or what writing met.
        """
        self._check.adapter(adapter, ref.name)
        resident: Future[int] = Future()
        if self.merged is not None:
            resident.set_result(0)
            return resident
        self._backend.prepare_adapter(adapter)
        self._order(LoadCommand(adapter, ref, resident))
        return resident

    def _order(self, order: UnloadCommand | LoadCommand) -> None:
        self._inbox.append(order)
        if self._failure is not None:
            self._refuse_arrived(self._failure)  # no step takes it in any more

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        num_compiling = self._compiler.num_waiting if self._compiler is not None else 0
        return bool(self._inbox) or len(self._live_ids) > num_compiling or self._writer.has_work

    @property
    def max_rank(self) -> int:
        """The largest rank that any adapter may have here, whichever modules it changes; 0 if there is no room."""
        return self._adapters.limits.max_rank

    @property
    def can_embed(self) -> bool:
        """Whether requests may ask for an embedding."""
        return self._backend.limits.can_embed

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine stopped computing, or None while it works."""
        return self._failure

    @property
    def computing(self) -> list[str]:
        """Ids of the requests in the present step, or in the last one."""
        plan = self._plan
        return [] if plan is None else [sequence.request_id for sequence, _ in plan.items]

    def stats(self) -> EngineStats:
        """What the engine holds and has done, as of about now."""
        return self._meter.stats(
            self._blocks,
            self._adapters,
            self._split,
            num_live=len(self._live_ids),
            num_running=self._scheduler.num_running,
            merged=self.merged,
            service_gap=self._scheduler.service_gap(),
            compile_s=self._backend.compile_s,
        )

    # -- the engine's thread ------------------------------------------------------------------

    def step(self) -> list[TokenChunk]:
        """Take in what has arrived, compute one batch, and return what it produced."""
        if self._failure is not None:
            return self._refuse_all(self._failure)
        self._plan = None
        self._meter.now_s = self._clock()
        try:
            chunks = self._drain_inbox()
            self._plan = self._scheduler.schedule()
            self._plan, refused = self._writer.apply(self._plan)
            output = self._forward(self._plan)
            self._meter.now_s = self._clock()
            chunks += refused + self._scheduler.commit(self._plan, output)
        except Exception as error:
            return self._fail(error)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._live_ids.pop(chunk.request_id, None)
        return chunks

    def shut_down(self, reason: EngineFailure) -> list[TokenChunk]:
        """Stop for good; returns the last chunks of everything live. `close` releases the memory."""
        if self._failure is None:
            self._failure = reason
        return self._refuse_all(self._failure)

    def close(self) -> None:
        """Release the device's memory. Nothing may step this engine any more."""
        if self._compiler is not None:
            self._compiler.close()
        self._backend.close()

    def check(self) -> None:
        """Assert that every block, row, reference and request is accounted for; for tests, between steps."""
        self._scheduler.check()

    def _drain_inbox(self) -> list[TokenChunk]:
        """Take in what has arrived, and give free rows to orders about adapters; returns chunks of what that ended."""
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
                case _Pin(digests):
                    self._adapters.pin(digests)
                    self._scheduler.live.reopen()
                case _RemoteService(served, continues):
                    self._scheduler.add_remote_service(served, continues=continues)
                case UnloadCommand() | LoadCommand():
                    self._commands.take(message)
            if chunk is not None:
                chunks.append(chunk)
        self._commands.settle(self._scheduler.live.num_of)
        return chunks

    def _on_compiled(self, sequence: Sequence, error: PolyloraError | None) -> None:
        """The compiler's thread: a sequence may queue now."""
        self._inbox.append(_Submit(sequence) if error is None else _Refuse(sequence.request_id, error))
        self.on_work()

    def _abort(self, request_id: str) -> TokenChunk | None:
        if self._compiler is not None and self._compiler.cancel(request_id) is not None:
            return TokenChunk(request_id, finish_reason="abort")
        return self._scheduler.live.end(request_id, "abort")

    def _forward(self, plan: Schedule) -> ForwardOutput | None:
        """Compute the step.

        None if there is nothing to compute, or if a write that the step waited for failed: the next one ends its
        adapter's requests and computes the others.
        """
        if not plan.items:
            return None
        started_s = self._clock()
        try:
            output = self._backend.forward(self._builder.build(plan.items))
        except AdapterWriteFailed:
            return None
        finally:
            if self._compiler is not None:
                self._compiler.wait_for_masks()
        took_s = self._clock() - started_s
        ranks = {sequence.adapter_slot: sequence.rank for sequence, _ in plan.items}
        num_tokens = sum(count for _, count in plan.items)
        num_token_rows = sum(count * sequence.rank for sequence, count in plan.items)
        self._split.observe(num_tokens, sum(ranks.values()), num_token_rows, took_s)
        self._scheduler.observe(plan, took_s)
        return output

    def _fail(self, error: Exception) -> list[TokenChunk]:
        """Stop for good. The state of the device and of the books is unknown: nothing here can be trusted any more."""
        failure = EngineFailure(f"the engine stopped: {type(error).__name__}: {error}", computing=self.computing)
        failure.__cause__ = error
        self._failure = failure
        return self._refuse_all(failure)

    def _refuse_all(self, failure: EngineFailure) -> list[TokenChunk]:
        """End everything live or still arriving with the failure."""
        self._refuse_arrived(failure)
        self._commands.refuse_all(failure)
        return [
            TokenChunk(request_id, finish_reason="error", error=failure)
            for request_id in self._live_ids.copy()
            if self._live_ids.pop(request_id, None) is not None
        ]

    def _refuse_arrived(self, failure: EngineFailure) -> None:
        """Answer the orders in the inbox. Any thread, once no step drains it: whoever takes one out answers it."""
        with contextlib.suppress(IndexError):  # another thread took the last one
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, UnloadCommand | LoadCommand):
                    refuse(message, failure)
