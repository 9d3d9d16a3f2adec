"""One engine replica on the virtual clock: queue, running requests, LoRA pool, and its next event.

Scheduling, LoRA pool and chunked prefill are the engine's own `FairQueue`, `AdapterPool`, `PrefillBudget` and
`split_prefill`; a step is not computed but lasts what `Costs` says. Prompt prefixes stay cached where KV memory has
room besides running requests, least recently used out first; so does the rest of the prompts, which no request uses
again. A request that arrives waits for the end of the current step, as in the engine. Steps that decode the same
sequences are taken together, so a request costs few events.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.engine.config import EvictionPolicy
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import MAX_CACHED_PREFIXES
from app.engine.scheduling.admission import MAX_BLOCK_REFUSALS, MAX_BYPASSES, MAX_URGENT
from app.engine.scheduling.chunked_prefill import PrefillBudget, fill_prefill, split_prefill
from app.engine.scheduling.fair_queue import (
    HELD_BLOCK_PRICE,
    HELD_ROW_PRICE,
    INPUT_PRICE,
    OUTPUT_PRICE,
    RANK_ROW_PRICE,
    FairQueue,
)
from app.engine.sequence import Status
from app.simulation.costs import Costs

#: Tokens per KV block (`engine.block_size`).
BLOCK_TOKENS = 16
#: How many of the steps taken together are reported to the prefill budget: as many as it remembers.
PACE_STEPS = 9


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """A replica's capacity; named like `engine` in the service's settings."""

    max_num_seqs: int = 16
    lora_pool_rows: int = 256
    rank_alignment: int = 8
    max_loras: int = 64
    kv_tokens: int = 65536
    eviction: EvictionPolicy = "lru"
    max_num_batched_tokens: int = 256
    prefill_step_s: float = 0.1  # engine.target_step_ms


class SimulatedRequest:
    """One request, with the fields of a `Sequence` that the fair queue uses."""

    __slots__ = (
        "adapter", "arrival_s", "bypassed", "digest", "done_s", "first_s", "index", "num_blocks", "num_cached",
        "num_charged", "num_pending", "num_prompt", "num_tries", "output_tokens", "prefix", "prefix_tokens", "rank",
        "replica", "request_id", "status", "tenant_id", "weight",
    )  # fmt: skip
    is_batch = False

    def __init__(
        self, index: int, arrival_s: float, adapter: int, digest: str | None, rank: int,
        prompt_tokens: int, output_tokens: int, tenant_id: str, weight: float,
        prefix: bytes | None = None, prefix_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.index = index
        self.request_id = str(index)
        self.arrival_s = arrival_s
        self.adapter = adapter
        self.digest = digest
        self.rank = rank
        self.num_prompt = self.num_pending = prompt_tokens  # pending: not computed yet
        self.output_tokens = output_tokens
        self.tenant_id = tenant_id
        self.weight = weight
        self.prefix, self.prefix_tokens = prefix, prefix_tokens  # its prompt's shared prefix and its length
        self.num_cached = 0  # prompt tokens that were cached at its last start
        self.num_charged = 0  # output tokens charged to its tenant
        self.num_blocks = 0
        self.bypassed = 0
        self.num_tries = 0
        self.status = Status.WAITING
        self.replica: Replica | None = None
        self.first_s = self.done_s = math.nan

    @property
    def request(self) -> SimulatedRequest:
        """The fair queue reads the weight from a sequence's request."""
        return self

    @property
    def num_kv_tokens(self) -> int:
        return self.num_prompt + self.output_tokens


class Replica:
    """Times are the virtual clock's, in seconds; they never go back."""

    def __init__(self, replica_id: str, started_s: float, costs: Costs, size: ReplicaSize) -> None:
        self.replica_id = replica_id
        self.started_s = started_s
        self.size = size
        self.version = 0  # of its next event: earlier ones are void
        self.reported_version = -1
        self.is_draining = False
        self.pool = AdapterPool(size.lora_pool_rows, size.rank_alignment, size.max_loras, policy=size.eviction)
        self.num_hits = self.num_loads = self.num_pinned_loads = self.num_tokens = 0
        self._pinned: frozenset[str] = frozenset()
        self.jobs: dict[int, SimulatedRequest] = {}  # requests that were sent to it and have not ended
        self._costs = costs
        self._queue: Any = FairQueue()  # of requests in place of sequences
        self._prompts: list[SimulatedRequest] = []  # running, with prompt tokens to compute, oldest first
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # (step after which it ends, index, job), a heap
        self._inbox: list[SimulatedRequest] = []  # requests that arrived during the current steps
        self._tenant_ids: set[str] = set()
        self._in_batch: Counter[str] = Counter()
        self._residents: dict[str, int] = {}
        self._residents_version = (0, 0)
        self._num_rows = self._kv_tokens = 0
        self._cached: OrderedDict[bytes | int, int] = OrderedDict()  # tokens by prefix, or by request for the rest
        self._cached_tokens = 0
        self._num_done = 0  # steps before the current ones
        # The current steps: begin, end, duration of one, number, and the chunks if it is a single one.
        self._began_s, self._end_s, self._step_s, self._num_steps = started_s, math.inf, 0.0, 0
        self._chunks: list[tuple[SimulatedRequest, int]] = []
        self._pace = PrefillBudget(size.prefill_step_s)
        self._write_s = 0.0  # adapter load time of the current step
        self._in_step = (0, 0)  # of a step with chunks: decoding sequences, prompt tokens
        self._has_changed = False  # since the last look at the queue

    @property
    def num_running(self) -> int:
        return len(self._prompts) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Includes requests that wait for their adapter."""
        return len(self.jobs) - self.num_running

    @property
    def kv_used(self) -> float:
        """The fraction of the KV memory that running requests hold."""
        return self._kv_tokens / self.size.kv_tokens

    def residents(self) -> dict[str, int]:
        """Rank rows of each adapter in the pool."""
        changes = (self.num_loads, self.pool.num_evictions)
        if self._residents_version != changes:
            self._residents_version = changes
            self._residents = {item.digest: item.num_rows for item in self.pool.residents()}
        return self._residents

    @property
    def cached_prefixes(self) -> tuple[bytes, ...]:
        """The cached prefixes that an engine would report: at most `MAX_CACHED_PREFIXES`, the last used at the end."""
        prefixes = [key for key in self._cached if isinstance(key, bytes)]
        return tuple(prefixes[-MAX_CACHED_PREFIXES:])

    def next_s(self) -> float:
        """When the current steps end if no request arrives before; infinity if there are none."""
        return self._end_s

    def pin(self, rank_of: Mapping[str, int]) -> None:
        """Load and pin these adapters (digest -> rank) before the first request; not counted as loads."""
        self._pinned = frozenset(rank_of)
        self.pool.pin(self._pinned)
        for digest, rank in rank_of.items():
            assert self.pool.acquire(digest, rank) is not None, "pinned adapters fit"
            self.pool.release(digest)

    def enter(self, job: SimulatedRequest, now_s: float) -> list[SimulatedRequest]:
        """Accept a request whose adapter is on the host. Returns the requests that ended until now."""
        ended = self.run(now_s)
        self._inbox.append(job)
        if self._end_s == math.inf:
            self._begin(now_s)
        elif self._num_steps > 1:  # it is considered at the end of the current step
            num_steps = int((now_s - self._began_s) / self._step_s) + 1
            if num_steps < self._num_steps:
                self._num_steps, self._end_s = num_steps, self._began_s + num_steps * self._step_s
                self.version += 1
        return ended

    def run(self, now_s: float) -> list[SimulatedRequest]:
        """Advance to this time. Returns the requests that ended."""
        ended: list[SimulatedRequest] = []
        while self._end_s <= now_s:
            at_s = self._end_s
            self._finish(at_s, ended)
            self._begin(at_s)
        return ended

    def _begin(self, now_s: float) -> None:
        """Plan the next step as the scheduler does; decode-only steps are combined until the first request ends."""
        if self._inbox:
            self._take_inbox()
        num_decoding = len(self._decoding)
        step_s = self._costs.decode_s(num_decoding, self._num_rows)
        self._chunks, num_written = [], 0
        if self._prompts or (self._has_changed and len(self._queue)):
            budget = self._pace.max_tokens(num_decoding, self.size.max_num_batched_tokens - num_decoding)
            num_written = self._take_in(budget)
        self.version += 1
        self._began_s = now_s
        if self._chunks:
            step_s = self._step_with_prompts_s(num_decoding)
            self._write_s = self._costs.row_write_s * num_written
            self._step_s, self._num_steps = step_s + self._write_s, 1
        elif num_decoding:
            self._step_s, self._num_steps = step_s, self._decoding[0][0] - self._num_done
        else:
            self._end_s = math.inf
            return
        self._end_s = now_s + self._num_steps * self._step_s

    def _step_with_prompts_s(self, num_decoding: int) -> float:
        """Duration of a step with `_chunks`; a chunk of one token costs as much as a decoded one."""
        num_rows, prompts_s, num_prompt = self._num_rows, 0.0, 0
        new: set[str] = set()
        for job, count in self._chunks:
            if count > 1:
                num_prompt += count
                prompts_s += self._costs.prompt_s(job.num_prompt - job.num_pending, count)
            else:
                num_decoding += 1
            if job.digest is not None and job.digest not in self._in_batch and job.digest not in new:
                new.add(job.digest)
                num_rows += job.rank
        self._in_step = (num_decoding, num_prompt)
        return self._costs.decode_s(num_decoding, num_rows) + prompts_s

    def _take_in(self, budget: int) -> int:
        """Fill the step's chunks with up to `budget` prompt tokens; returns the rank rows to be loaded for it."""
        prompts: Any = self._prompts  # in place of sequences for `split_prefill`
        counts = split_prefill(prompts, budget, self._queue.waiting_tenants()) if prompts else []
        budget -= sum(counts)
        admitted, num_written = self._admit(budget) if budget > 0 and self._has_changed else ([], 0)
        for job in admitted:
            count = min(job.num_pending, budget)
            if count:
                self._chunks.append((job, count))
                budget -= count
        fill_prefill(prompts, counts, budget)
        self._chunks += [(job, count) for job, count in zip(self._prompts, counts, strict=True) if count]
        self._prompts += admitted
        return num_written

    def _finish(self, now_s: float, ended: list[SimulatedRequest]) -> None:
        """Complete the current steps; requests that end are appended to `ended`."""
        self._observe_pace()
        self._num_done += self._num_steps
        self.num_tokens += self._num_steps * len(self._decoding)
        for job, count in self._chunks:
            self.num_tokens += count
            job.num_pending -= count
            if not job.num_pending:
                self._first_token(job, now_s)
        while self._decoding and self._decoding[0][0] <= self._num_done:
            ended.append(self._end(heapq.heappop(self._decoding)[2], now_s))

    def _observe_pace(self) -> None:
        """Report the steps to the prefill budget as the engine does."""
        if self._chunks:
            self._pace.observe(*self._in_step, self._step_s - self._write_s)
            return
        observe, num_decoding = self._pace.observe, len(self._decoding)
        for _ in range(min(self._num_steps, PACE_STEPS)):
            observe(num_decoding, 0, self._step_s)

    def _first_token(self, job: SimulatedRequest, now_s: float) -> None:
        if math.isnan(job.first_s):
            job.first_s = now_s
        self._prompts.remove(job)
        if job.prefix is not None:
            self._cache(job.prefix, job.prefix_tokens)
        if job.digest is not None:
            self._in_batch[job.digest] += 1
            if self._in_batch[job.digest] == 1:
                self._num_rows += job.rank
        heapq.heappush(self._decoding, (self._num_done + job.output_tokens - 1, job.index, job))

    def _end(self, job: SimulatedRequest, now_s: float) -> SimulatedRequest:
        job.done_s = now_s
        self._has_changed = True
        self._kv_tokens -= job.num_kv_tokens
        if job.prefix is not None:
            self._cache(job.index, job.num_kv_tokens - job.prefix_tokens)
        del self.jobs[job.index]
        self._charge(job, job.output_tokens)
        if job.digest is not None:
            self.pool.release(job.digest)
            self._in_batch[job.digest] -= 1
            if not self._in_batch[job.digest]:
                del self._in_batch[job.digest]
                self._num_rows -= job.rank
        return job

    def _take_inbox(self) -> None:
        """Queue the requests that arrived since the last step began, after charging the running ones."""
        for job in self._inbox:
            self._tenant_ids.add(job.tenant_id)
        self._settle()
        for job in self._inbox:
            self._queue.push(job)
        self._inbox.clear()
        self._has_changed = True

    def _settle(self) -> None:
        """Charge running requests up to now, where it affects the order: between tenants."""
        if len(self._tenant_ids) > 1:
            for last_step, _, job in self._decoding:
                self._charge(job, job.output_tokens - (last_step - self._num_done))

    def _charge(self, job: SimulatedRequest, num_tokens: int) -> None:
        """Charge for a request's answer up to `num_tokens` tokens."""
        num_blocks = -(-(job.num_prompt + num_tokens - 1) // BLOCK_TOKENS)
        held = HELD_BLOCK_PRICE * num_blocks + HELD_ROW_PRICE * job.rank
        self._queue.charge(job, (OUTPUT_PRICE + held) * (num_tokens - job.num_charged))
        job.num_charged = num_tokens

    def _admit(self, max_tokens: int) -> tuple[list[SimulatedRequest], int]:
        """Admit as `Admission` does: in fair order, bypassing requests without room, which become urgent after a while.

        Returns the admitted requests, and the rank rows to be loaded for them.
        """
        admitted: list[SimulatedRequest] = []
        bypassed: SimulatedRequest | None = None
        num_refused = num_tokens = num_written = 0
        room = self.size.max_num_seqs - self.num_running
        self._has_changed = False
        self._settle()
        for job in self._queue.candidates() if room > 0 else ():
            if len(admitted) == room or num_tokens >= max_tokens:
                self._has_changed = True
                break
            is_too_long = self._kv_tokens + job.num_kv_tokens > self.size.kv_tokens
            if is_too_long and (admitted or self.num_running):
                break
            num_loads = self.num_loads
            if job.digest is not None and not self._place(job):
                bypassed = bypassed or job
                num_refused += 1
                if num_refused == MAX_BLOCK_REFUSALS:
                    break
                continue
            num_written += job.rank * (self.num_loads - num_loads)
            self._use_cached_prefix(job)
            job.status = Status.RUNNING
            self._queue.charge(job, INPUT_PRICE * job.num_pending)
            num_tokens += job.num_pending
            self._kv_tokens += job.num_kv_tokens
            admitted.append(job)
            if bypassed is not None:
                bypassed.bypassed += 1
        for job in admitted:
            self._queue.remove(job)
        if bypassed is not None and bypassed.bypassed >= MAX_BYPASSES and self._queue.num_urgent < MAX_URGENT:
            self._queue.mark_urgent(bypassed)
            self._has_changed = True
        return admitted, num_written

    def _use_cached_prefix(self, job: SimulatedRequest) -> None:
        """Skip the cached prefix of a starting request's prompt."""
        if job.prefix is not None and job.prefix in self._cached:
            self._cached.move_to_end(job.prefix)
            job.num_cached = job.prefix_tokens
            job.num_pending = job.num_prompt - job.prefix_tokens

    def _cache(self, key: bytes | int, num_tokens: int) -> None:
        """Cache tokens, evicting the least recently used beyond the KV memory."""
        self._cached_tokens += num_tokens - self._cached.pop(key, 0)
        self._cached[key] = num_tokens
        while self._cached and self._cached_tokens + self._kv_tokens > self.size.kv_tokens:
            self._cached_tokens -= self._cached.popitem(last=False)[1]

    def _place(self, job: SimulatedRequest) -> bool:
        assert job.digest is not None
        size_bytes = round(job.rank * self._costs.row_bytes)
        grant = self.pool.acquire(job.digest, job.rank, size_bytes=size_bytes, tenant_id=job.tenant_id)
        if grant is None:
            if self._queue.is_urgent(job):
                self.pool.reserve(job.digest, job.rank)
            return False
        if grant.needs_write:
            self.num_loads += 1
            self.num_pinned_loads += job.digest in self._pinned
            self._queue.charge(job, RANK_ROW_PRICE * grant.num_rows)
        else:
            self.num_hits += 1
        return True
