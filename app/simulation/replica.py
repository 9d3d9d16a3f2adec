"""One engine replica on the virtual clock: who waits, who runs, what is in its rows, and when something happens next.

In: jobs, and the time. Out: the time of the next event, and at it the jobs that have had their first token or have
ended. Whose turn it is and what the rows hold is decided by the engine's own `FairQueue` and `AdapterPool`; a step is
not computed but lasts what `Costs` says. Rule: between two events nothing changes, so that decoding is one division:
all that decode have come so many steps further. While prompts wait, they and the decoding streams get half of the time
each, as the engine's pace of prefill does (`app.engine.scheduling.prefill`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from app.engine.config import EvictionPolicy
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.scheduling.admission import MAX_BLOCK_REFUSALS, MAX_BYPASSES, MAX_URGENT
from app.engine.scheduling.fair_queue import INPUT_PRICE, OUTPUT_PRICE, RANK_ROW_PRICE, FairQueue
from app.simulation.costs import Costs

#: What is left of a job after rounding.
_NEARLY = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """What one replica can hold; the names are those of `engine` in the service's settings."""

    max_batch_sequences: int = 16
    adapter_rank_rows: int = 256
    rank_alignment: int = 8
    max_adapter_slots: int = 64
    kv_tokens: int = 65536
    eviction: EvictionPolicy = "lru"


class Job:
    """One request. It is a `Sequence` as far as the fair queue looks at one."""

    __slots__ = (
        "adapter", "arrival_s", "bypassed", "digest", "done_s", "first_s", "index", "left_s", "num_blocks",
        "num_pending", "num_tries", "output_tokens", "rank", "replica", "request_id", "tenant_id", "weight",
    )  # fmt: skip
    is_batch = False

    def __init__(
        self, index: int, arrival_s: float, adapter: int, digest: str | None, rank: int,
        prompt_tokens: int, output_tokens: int, tenant_id: str, weight: float,
    ) -> None:  # fmt: skip
        self.index = index
        self.request_id = str(index)
        self.arrival_s = arrival_s
        self.adapter = adapter
        self.digest = digest
        self.rank = rank
        self.num_pending = prompt_tokens
        self.output_tokens = output_tokens
        self.tenant_id = tenant_id
        self.weight = weight
        self.num_blocks = 0
        self.bypassed = 0
        self.num_tries = 0
        self.left_s = 0.0
        self.replica: Replica | None = None
        self.first_s = self.done_s = math.nan

    @property
    def request(self) -> Job:
        """The fair queue asks a sequence's request for its weight."""
        return self

    @property
    def num_kv_tokens(self) -> int:
        return self.num_pending + self.output_tokens


class Replica:
    """Times are the virtual clock's, in seconds; they never go back."""

    def __init__(self, replica_id: str, started_s: float, costs: Costs, size: ReplicaSize) -> None:
        self.replica_id = replica_id
        self.started_s = started_s
        self.size = size
        self.version = 0  # of its next event: earlier ones are void
        self.reported_version = -1
        self.is_leaving = False
        self.pool = AdapterPool(
            size.adapter_rank_rows, size.rank_alignment, size.max_adapter_slots, policy=size.eviction
        )
        self.num_hits = self.num_loads = self.num_tokens = 0
        self.jobs: dict[int, Job] = {}  # those that were given to it and have not ended
        self._costs = costs
        self._queue: Any = FairQueue()  # of jobs, which are sequences to it
        self._prompts: deque[Job] = deque()
        self._decoding: list[tuple[float, int, Job]] = []  # (step at which it ends, index, job), a heap
        self._in_batch: Counter[str] = Counter()
        self._residents: dict[str, int] = {}
        self._residents_at = (0, 0)
        self._num_rows = self._kv_tokens = 0
        self._now_s = started_s
        self._steps = 0.0
        self._step_s = costs.decode_s(0, 0)

    @property
    def num_running(self) -> int:
        return len(self._prompts) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Those that wait for their adapter, too."""
        return len(self.jobs) - self.num_running

    @property
    def kv_used(self) -> float:
        """The part of its KV memory that running jobs hold."""
        return self._kv_tokens / self.size.kv_tokens

    def residents(self) -> dict[str, int]:
        """Rank rows of each adapter in the pool."""
        changes = (self.num_loads, self.pool.num_evictions)
        if self._residents_at != changes:
            self._residents_at = changes
            self._residents = {item.digest: item.num_rows for item in self.pool.residents()}
        return self._residents

    def next_s(self) -> float:
        """When the next job gets its first token or ends, if nothing comes before; infinity if there is none."""
        share = 2.0 if self._prompts and self._decoding else 1.0
        prompt_s = share * self._prompts[0].left_s if self._prompts else math.inf
        decode_s = share * (self._decoding[0][0] - self._steps) * self._step_s if self._decoding else math.inf
        return self._now_s + max(0.0, min(prompt_s, decode_s))

    def enter(self, job: Job, now_s: float) -> list[Job]:
        """A job whose adapter is on the host. Returns those that ended at this moment."""
        ended = self.run(now_s)
        self._queue.push(job)
        self._admit()
        self._change()
        return ended

    def run(self, now_s: float) -> list[Job]:
        """Go on to this time. Returns the jobs that have ended."""
        spent_s, self._now_s = now_s - self._now_s, now_s
        share = 0.5 if self._prompts and self._decoding else 1.0
        if self._decoding:
            self._steps += share * spent_s / self._step_s
        if self._prompts:
            self._prompts[0].left_s -= share * spent_s
        has_changed = False
        while self._prompts and self._prompts[0].left_s <= _NEARLY:
            has_changed = True
            self._first_token(self._prompts.popleft())
        ended = []
        while self._decoding and self._decoding[0][0] - self._steps <= _NEARLY / self._step_s:
            has_changed = True
            ended.append(self._end(heapq.heappop(self._decoding)[2]))
        if has_changed:
            self._admit()
            self._change()
        return ended

    def _first_token(self, job: Job) -> None:
        if math.isnan(job.first_s):
            job.first_s = self._now_s
        self.num_tokens += job.num_pending + 1
        if job.digest is not None:
            self._in_batch[job.digest] += 1
            if self._in_batch[job.digest] == 1:
                self._num_rows += job.rank
        heapq.heappush(self._decoding, (self._steps + job.output_tokens - 1, job.index, job))

    def _end(self, job: Job) -> Job:
        job.done_s = self._now_s
        self.num_tokens += job.output_tokens - 1
        self._kv_tokens -= job.num_kv_tokens
        del self.jobs[job.index]
        self._queue.charge(job, OUTPUT_PRICE * job.output_tokens)
        if job.digest is not None:
            self.pool.release(job.digest)
            self._in_batch[job.digest] -= 1
            if not self._in_batch[job.digest]:
                del self._in_batch[job.digest]
                self._num_rows -= job.rank
        return job

    def _admit(self) -> None:
        """As `Admission` does: in fair order, past those that have no room, which are put first after a while."""
        admitted: list[Job] = []
        passed: Job | None = None
        num_refused = 0
        room = self.size.max_batch_sequences - self.num_running
        if room <= 0 or not len(self._queue):
            return
        for job in self._queue.candidates():
            if len(admitted) == room:
                break
            if self._kv_tokens + job.num_kv_tokens > self.size.kv_tokens and (admitted or self.num_running):
                break
            if job.digest is not None and not self._place(job):
                passed = passed or job
                num_refused += 1
                if num_refused == MAX_BLOCK_REFUSALS:
                    break
                continue
            job.left_s += job.num_pending * self._costs.prompt_token_s
            self._kv_tokens += job.num_kv_tokens
            admitted.append(job)
            if passed is not None:
                passed.bypassed += 1
        for job in admitted:
            self._queue.remove(job)
            self._queue.charge(job, INPUT_PRICE * job.num_pending)
            self._prompts.append(job)
        if passed is not None and passed.bypassed >= MAX_BYPASSES and self._queue.num_urgent < MAX_URGENT:
            self._queue.mark_urgent(passed)

    def _place(self, job: Job) -> bool:
        assert job.digest is not None
        grant = self.pool.acquire(job.digest, job.rank)
        if grant is None:
            if self._queue.is_urgent(job):
                self.pool.reserve(job.digest, job.rank)
            return False
        if grant.needs_write:
            self.num_loads += 1
            job.left_s = job.rank * self._costs.row_write_s
            self._queue.charge(job, RANK_ROW_PRICE * grant.num_rows)
        else:
            self.num_hits += 1
        return True

    def _change(self) -> None:
        self._step_s = self._costs.decode_s(len(self._decoding), self._num_rows)
        self.version += 1
