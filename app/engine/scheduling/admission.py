"""Which waiting sequences start in this step, and the adapter writes that this takes.

In: the fair queue, the block and adapter pools. Out: admitted sequences holding their blocks and
pin, and the writes to perform before they run. One sequence that must wait (for rank rows, for
blocks, for its turn to write) does not hold up the others; but once `MAX_BYPASSES` of them have
been admitted past the first in fair order, or if one was preempted, it is urgent: rows are reserved
for it, and while it waits for blocks nobody else is admitted. Everything running ends, so everything waiting starts,
but for adapters that what operators keep on the device leaves no room for: those are refused.
Whose turn it is, is the queue's order; what runs next is the scheduler's.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.errors import AdapterKeptOut
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.kv_blocks import BlockPool
from app.engine.schedule import AdapterWrite, Refusal
from app.engine.scheduling.fair_queue import INPUT_PRICE, RANK_ROW_PRICE, FairQueue
from app.engine.sequence import Sequence, Status
from app.engine.stats import Meter

#: Admissions of others that a considered sequence lets pass before it is put first.
MAX_BYPASSES = 16

#: Sequences put first for their age at a time. More would replace the fair order by that of arrival.
MAX_URGENT = 4

#: Sequences refused for want of blocks before a pass over the queue stops (each costs a cache lookup).
MAX_BLOCK_REFUSALS = 32

_NO_RANK = 1 << 62


class Admitted(NamedTuple):
    """Sequences that hold their blocks and pins, the writes they need, and adapters that must not wait."""

    sequences: list[Sequence]
    writes: list[AdapterWrite]
    refusals: list[Refusal]


class Admission:
    """Moves sequences from the queue into running, as far as memory allows."""

    def __init__(
        self, queue: FairQueue, blocks: BlockPool, adapters: AdapterPool, meter: Meter, *, max_write_bytes: int
    ) -> None:
        self._queue = queue
        self._blocks = blocks
        self._adapters = adapters
        self._meter = meter
        self._max_write_bytes = max_write_bytes
        self._num_admitted = 0
        self._is_open = True

    def reopen(self) -> None:
        """Something arrived or something was given back: it is worth looking at the queue again."""
        self._is_open = True

    def admit(self, max_sequences: int, max_tokens: int, num_running: int) -> Admitted:
        """Sequences in fair order.

        At most `max_sequences`, and none beyond those that fill `max_tokens`. Writes are limited for the sake of those
        that run: where nothing runs, all that have room start together.
        """
        admitted: list[Sequence] = []
        writes: list[AdapterWrite] = []
        refusals: list[Refusal] = []
        if not self._is_open or max_sequences <= 0 or not len(self._queue):
            return Admitted(admitted, writes, refusals)
        self._is_open = False
        passed_first: Sequence | None = None
        refused_digests: set[str] = set()
        refused_rank = _NO_RANK  # no rows for an absent adapter of this rank, so for none above it but the reserved
        written_bytes = num_tokens = num_block_refusals = 0
        is_limited = num_running > 0
        for sequence in self._queue.candidates():
            if len(admitted) == max_sequences or num_tokens >= max_tokens:
                self._is_open = True
                break
            digest = sequence.adapter_digest
            is_new = digest is not None and not self._adapters.is_resident(digest)
            urgent = self._queue.is_urgent(sequence)
            if passed_first is None and not urgent:
                passed_first = sequence  # unless it is admitted below
            is_too_large = is_new and sequence.rank >= refused_rank and digest != self._adapters.reserved_for
            if is_too_large or digest in refused_digests:
                continue
            found = self._find_prefix(sequence)
            if not self._blocks_suffice(sequence, found, num_running + len(admitted)):
                num_block_refusals += 1
                if urgent or num_block_refusals == MAX_BLOCK_REFUSALS:
                    break
                continue
            if sequence.adapter is not None and digest is not None:
                size = sequence.adapter.card.size_bytes if is_new else 0
                if is_limited and is_new and written_bytes and written_bytes + size > self._max_write_bytes:
                    self._is_open = True  # the budget is new in the next step
                    refused_digests.add(digest)
                    continue
                card = sequence.adapter.card
                grant = self._adapters.acquire(digest, sequence.rank, sequence.extra_bytes, card.size_bytes)
                if grant is None:
                    refused_digests.add(digest)
                    if (refusal := self._refusal(sequence, digest)) is not None:
                        refusals.append(refusal)
                        continue
                    if urgent:
                        self._adapters.reserve(digest, sequence.rank, sequence.extra_bytes)
                    if is_new and not sequence.extra_bytes:  # else bytes may be what is missing, not rows
                        refused_rank = sequence.rank
                    continue
                self._meter.adapter_granted(is_hit=not grant.needs_write)
                sequence.adapter_slot = grant.adapter_slot
                if grant.needs_write:
                    written_bytes += max(size, 1)
                    write = AdapterWrite(grant.adapter_slot, grant.row_start, sequence.adapter, sequence.tenant_id)
                    writes.append(write)
                    self._queue.charge(sequence, RANK_ROW_PRICE * grant.num_rows)
            self._start(sequence, found)
            admitted.append(sequence)
            num_tokens += sequence.num_pending
            if passed_first is sequence:
                passed_first = None
            elif passed_first is not None:
                passed_first.bypassed += 1
        for sequence in admitted:
            self._queue.remove(sequence)
        self._age(passed_first)
        return Admitted(admitted, writes, refusals)

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence goes away for good: nothing stays reserved for it."""
        if sequence.adapter_digest is not None:
            self._adapters.cancel_reservation(sequence.adapter_digest)
        self._queue.remove(sequence)
        self._is_open = True

    def _refusal(self, sequence: Sequence, digest: str) -> Refusal | None:
        """Why waiting would be in vain, if it would."""
        assert sequence.request.adapter is not None
        try:
            self._adapters.check_room(sequence.request.adapter.name, digest, sequence.rank, sequence.extra_bytes)
        except AdapterKeptOut as error:
            return Refusal(digest, error)
        return None

    def _age(self, passed_first: Sequence | None) -> None:
        """The first in fair order that had to let others pass may become urgent; those behind it wait for theirs."""
        if passed_first is None or passed_first.bypassed < MAX_BYPASSES or self._queue.num_urgent >= MAX_URGENT:
            return
        self._queue.mark_urgent(passed_first)
        self._is_open = True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks it can start from. The last known token is always computed: its output is wanted."""
        num_full = (sequence.num_tokens - 1) // self._blocks.block_size
        return self._blocks.find(sequence.extend_hashes(num_full)[:num_full], sequence.block_bytes)

    def _blocks_suffice(self, sequence: Sequence, found: list[int], num_running: int) -> bool:
        """Room for every known token, and one spare block for each running sequence to grow into."""
        num_new = -(-sequence.num_tokens // self._blocks.block_size) - len(found)
        return self._blocks.num_free_without(found) >= num_new + num_running

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        num_cached = len(found) * self._blocks.block_size
        self._blocks.reference(found)
        sequence.add_blocks(found)
        new = self._blocks.allocate(-(-sequence.num_tokens // self._blocks.block_size) - len(found))
        assert new is not None, "blocks were counted before they were taken"
        sequence.add_blocks(new)
        sequence.num_computed = num_cached
        sequence.status = Status.RUNNING
        if sequence.num_cached is None:
            sequence.num_cached = min(num_cached, sequence.num_prompt)
            self._meter.admitted(sequence.tenant_id, sequence.num_prompt, sequence.num_cached)
            self._queue.charge(sequence, INPUT_PRICE * (sequence.num_prompt - sequence.num_cached))
        if sequence.order is None:
            sequence.order = self._num_admitted
            self._num_admitted += 1
