"""Admission: which waiting sequences start in this step, and the adapter writes that this takes.

Admitted sequences hold their blocks and a reference on their adapter's rows; the writes are performed before they run.
A sequence that must wait (for rank rows, for blocks, for its turn to write) does not hold up the others. Once
`MAX_BYPASSES` others have been admitted past the first in fair order, or if it was preempted, it is urgent: rows are
reserved for it, and while it waits for blocks no other sequence is admitted. Everything running ends, so every
interactive sequence starts; only adapters for which pinned ones leave no room are refused. The fair queue gives the
order; the scheduler chooses what runs next.

Batch sequences come last and leave room for others: they take at most half of the places, and start while a quarter of
the blocks is free. The first of them that finds no blocks holds up the others of its class, so that it starts. Rows are
not reserved for them, because that would delay interactive requests for the adapters in the way: one with a large
adapter waits while others use small ones all over the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from app.engine.errors import AdapterPoolFull
from app.engine.meter import EngineMeter
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.scheduling.fair_queue import INPUT_PRICE, RANK_ROW_PRICE, FairQueue
from app.engine.scheduling.schedule import AdapterWrite, Refusal
from app.engine.sequence import Sequence, Status

#: Admissions of others past the first in fair order before it becomes urgent.
MAX_BYPASSES = 16

#: Sequences that are urgent because they were bypassed, at a time. More would replace the fair order by that of
#: arrival.
MAX_URGENT = 4

#: A pass over the queue stops after so many sequences that find no blocks (each costs a cache lookup).
MAX_BLOCK_REFUSALS = 32

#: While others run, a batch sequence starts only if this share of the blocks stays free.
BATCH_FREE_SHARE = 1 / 4

_NO_ROWS = 1 << 62


class AdmissionResult(NamedTuple):
    """Sequences that hold their blocks and rows, the writes they need, and adapters to refuse."""

    sequences: list[Sequence]
    writes: list[AdapterWrite]
    refusals: list[Refusal]


class _Pass:
    """One pass over the queue.

    `refused_rows`: per tenant, the rank for which there are no rows, so none above it either, except for the reserved
    adapter. `passed_first`: the first in fair order that others were admitted past, unless it is admitted itself.
    """

    __slots__ = ("admitted", "passed_first", "refusals", "refused_digests", "refused_rows", "writes", "written_bytes")

    def __init__(self) -> None:
        self.admitted: list[Sequence] = []
        self.writes: list[AdapterWrite] = []
        self.refusals: list[Refusal] = []
        self.passed_first: Sequence | None = None
        self.refused_digests: set[tuple[str, str]] = set()  # (tenant, digest): another tenant's quota may have room
        self.refused_rows: dict[str, int] = {}
        self.written_bytes = 0

    def admit(self, sequence: Sequence) -> None:
        self.admitted.append(sequence)
        if self.passed_first is sequence:
            self.passed_first = None
        elif self.passed_first is not None:
            self.passed_first.bypassed += 1

    def result(self) -> AdmissionResult:
        return AdmissionResult(self.admitted, self.writes, self.refusals)


class Admission:
    """Starts waiting sequences as far as memory allows."""

    def __init__(
        self, queue: FairQueue, blocks: BlockPool, adapters: AdapterPool, meter: EngineMeter, *, max_write_bytes: int
    ) -> None:
        self._queue = queue
        self._blocks = blocks
        self._adapters = adapters
        self._meter = meter
        self._max_write_bytes = max_write_bytes
        self._num_admitted = 0
        self._is_open = True

    def reopen(self) -> None:
        """Allow the next pass: something arrived or was released."""
        self._is_open = True

    def admit(
        self,
        max_sequences: int,
        max_tokens: int,
        num_running: int,
        max_batches: int = 0,
        token_limit_of: Mapping[str, int] | None = None,
        preferred: list[Sequence] | None = None,
        places_of: Mapping[str, int] | None = None,
    ) -> AdmissionResult:
        """Start sequences in fair order.

        At most `max_sequences`, `max_batches` of them batch sequences, until `max_tokens` are filled. `token_limit_of`:
        the most tokens that some tenants may compute in this step. `preferred` sequences, for which places were made,
        are tried first. `places_of`: the most interactive sequences of some tenants that may start. The limit on bytes
        written protects running streams: if nothing runs, all that have room start together.
        """
        queue_pass = _Pass()
        if not self._is_open or max_sequences <= 0 or not len(self._queue):
            return queue_pass.result()
        self._is_open = False
        num_tokens = num_block_refusals = num_batches = 0
        tokens_left_of = dict(token_limit_of or {})
        places_left_of = dict(places_of or {})
        for sequence in _with_first(preferred or [], self._queue.candidates()):
            if len(queue_pass.admitted) == max_sequences or num_tokens >= max_tokens:
                self._is_open = True
                break
            is_batch = sequence.request.is_batch
            if is_batch and num_batches == max_batches:
                break  # all that follow are batch sequences
            places_left = max_sequences if is_batch else places_left_of.get(sequence.tenant_id, max_sequences)
            if places_left <= 0:
                continue
            is_urgent = self._queue.is_urgent(sequence)
            if not sequence.has_memory and num_tokens + sequence.num_pending > max_tokens:
                self._is_open = True  # an encoder's text is computed whole, in the next step
                break
            if queue_pass.passed_first is None and not is_urgent and not is_batch:
                queue_pass.passed_first = sequence  # reset below if it is admitted
            if self._is_refused(sequence, queue_pass):
                continue
            found = self._find_prefix(sequence)
            if not self._blocks_suffice(sequence, found, num_running + len(queue_pass.admitted)):
                num_block_refusals += 1
                if is_urgent or is_batch or num_block_refusals == MAX_BLOCK_REFUSALS:
                    break
                continue
            if not self._place_adapter(sequence, queue_pass, is_urgent=is_urgent, is_limited=num_running > 0):
                continue
            self._start(sequence, found)
            queue_pass.admit(sequence)
            num_batches += is_batch
            places_left_of[sequence.tenant_id] = places_left - (not is_batch)
            count = min(sequence.num_pending, tokens_left_of.get(sequence.tenant_id, max_tokens))
            num_tokens += count
            if sequence.tenant_id in tokens_left_of:
                tokens_left_of[sequence.tenant_id] -= count
        for sequence in queue_pass.admitted:
            self._queue.remove(sequence)
        self._mark_bypassed(queue_pass.passed_first)
        return queue_pass.result()

    def cancel(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that ends; nothing stays reserved for it."""
        if sequence.adapter_digest is not None:
            self._adapters.cancel_reservation(sequence.adapter_digest)
        self._queue.remove(sequence)
        self._is_open = True

    def _is_refused(self, sequence: Sequence, queue_pass: _Pass) -> bool:
        """Whether this pass already found that the sequence's adapter has no room."""
        digest = sequence.adapter_digest
        if digest is None:
            return False
        if (sequence.tenant_id, digest) in queue_pass.refused_digests:
            return True
        refused_rows = queue_pass.refused_rows.get(sequence.tenant_id, _NO_ROWS)
        is_too_large = sequence.num_rank_rows_needed >= refused_rows and digest != self._adapters.reserved_for
        return is_too_large and not self._adapters.is_resident(digest)

    def _place_adapter(self, sequence: Sequence, queue_pass: _Pass, *, is_urgent: bool, is_limited: bool) -> bool:
        """Reference the adapter's rows and plan their write if needed; False if the sequence must wait."""
        adapter, digest = sequence.adapter, sequence.adapter_digest
        if adapter is None or digest is None:
            return True
        card, tenant_id = adapter.card, sequence.tenant_id
        is_new = not self._adapters.is_resident(digest)
        size = card.size_bytes if is_new else 0
        if (
            is_limited
            and is_new
            and queue_pass.written_bytes
            and queue_pass.written_bytes + size > self._max_write_bytes
        ):
            self._is_open = True  # the next step has a new budget
            queue_pass.refused_digests.add((tenant_id, digest))
            return False
        num_needed, extra_bytes = sequence.num_rank_rows_needed, sequence.extra_bytes
        grant = self._adapters.acquire(digest, num_needed, extra_bytes, card.size_bytes, tenant_id)
        if grant is None:
            queue_pass.refused_digests.add((tenant_id, digest))
            if (refusal := self._refusal(sequence, digest)) is not None:
                queue_pass.refusals.append(refusal)
                return False
            if is_urgent:
                self._adapters.reserve(digest, num_needed, extra_bytes)
            if is_new and not extra_bytes:  # else bytes may be missing, not rows
                queue_pass.refused_rows[tenant_id] = num_needed
            return False
        self._meter.count_adapter_use(is_hit=not grant.needs_write)
        sequence.adapter_slot = grant.adapter_slot
        sequence.num_rank_rows = grant.num_rows
        if grant.needs_write:
            queue_pass.written_bytes += max(size, 1)
            queue_pass.writes.append(AdapterWrite(grant.adapter_slot, grant.row_start, adapter, sequence))
            self._queue.charge(sequence, RANK_ROW_PRICE * grant.num_rows)
        return True

    def _refusal(self, sequence: Sequence, digest: str) -> Refusal | None:
        """The error of an adapter that can never get room, if that is so."""
        try:
            self._adapters.check_room(digest, sequence.num_rank_rows_needed, sequence.extra_bytes)
        except AdapterPoolFull as error:
            return Refusal(digest, error)
        return None

    def _mark_bypassed(self, passed_first: Sequence | None) -> None:
        """Mark the first in fair order as urgent if too many were admitted past it."""
        if passed_first is None or passed_first.bypassed < MAX_BYPASSES or self._queue.num_urgent >= MAX_URGENT:
            return
        self._queue.mark_urgent(passed_first)
        self._is_open = True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks it can start from. Tokens whose output is needed, such as the last, are always computed."""
        if not sequence.may_skip_tokens:
            return []
        num_full = sequence.num_skippable // self._blocks.block_size
        return self._blocks.find(sequence.extend_hashes(num_full)[:num_full], sequence.block_bytes)

    def _blocks_suffice(self, sequence: Sequence, found: list[int], num_running: int) -> bool:
        """Whether there are blocks for every known token, and one spare block per running sequence."""
        if not sequence.has_memory:
            return True
        num_new = sequence.num_blocks_for(sequence.num_tokens) - len(found)
        if sequence.request.is_batch and num_running:
            num_new += int(BATCH_FREE_SHARE * self._blocks.num_blocks)
        return self._blocks.num_free_without(found) >= num_new + num_running

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        num_cached = len(found) * self._blocks.block_size
        self._blocks.reference(found)
        sequence.add_blocks(found)
        new = self._blocks.allocate(sequence.num_blocks_for(sequence.num_tokens) - len(found))
        assert new is not None, "blocks were counted before they were taken"
        sequence.add_blocks(new)
        sequence.num_computed = num_cached
        sequence.held_since_s = self._meter.now_s
        sequence.status = Status.RUNNING
        if sequence.num_cached is None:
            sequence.num_cached = min(num_cached, sequence.num_prompt)
            if sequence.request.num_charged is None:
                self._meter.count_admission(sequence.num_prompt, sequence.num_cached)
            self._queue.charge(sequence, INPUT_PRICE * (sequence.num_prompt - sequence.num_cached))
        if sequence.order is None:
            sequence.order = self._num_admitted
            self._num_admitted += 1


def _with_first(first: list[Sequence], others: Iterator[Sequence]) -> Iterator[Sequence]:
    yield from first
    for sequence in others:
        if sequence not in first:
            yield sequence
