"""What the next step computes: continuous batching with chunked prefill.

In: sequences to run or to end, and each step's output. Out: a `Schedule` per step and the chunks it
produced. Every running sequence that decodes gets its token first; the rest of the token budget, no more than the pace
of prefill allows beside them, is shared by prefill chunks and newly admitted sequences. When blocks run out the
youngest gives all of its own back and is computed again later (preemption by recompute), a batch's before others: the
oldest always finishes, so everyone does. Arrays are the batch builder's, memory is the pools'.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.engine.batch import ForwardOutput
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.kv_blocks import BlockPool, num_head_blocks
from app.engine.request import FinishReason, TokenChunk, TokenLogprobs
from app.engine.schedule import AdapterWrite, Refusal, Schedule
from app.engine.scheduling.admission import Admission
from app.engine.scheduling.fair_queue import INPUT_PRICE, FairQueue
from app.engine.scheduling.isolation import Isolation
from app.engine.scheduling.outputs import logprobs_of, overflow_error, pooled
from app.engine.scheduling.prefill import PrefillPace, keep_room, spend_rest, split_prefill
from app.engine.sequence import Sequence, Status
from app.engine.speculation.speculator import Speculator
from app.engine.stats import EngineMeter, TenantService


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(
        self,
        blocks: BlockPool,
        adapters: AdapterPool,
        meter: EngineMeter,
        *,
        max_batch_tokens: int,
        max_batch_sequences: int,
        max_write_bytes: int,
        pace: PrefillPace,
        isolation: Isolation,
        speculator: Speculator,
    ) -> None:
        self._blocks = blocks
        self._has_memory = blocks.num_blocks > 0
        self._head_index = num_head_blocks(blocks.block_size) - 1
        self._adapters = adapters
        self._meter = meter
        self._max_tokens = max_batch_tokens
        self._max_sequences = min(max_batch_sequences, max_batch_tokens)  # each decodes one token per step
        self._pace = pace
        self._isolation = isolation
        self._speculator = speculator
        self._queue = FairQueue()
        self._admission = Admission(self._queue, blocks, adapters, meter, max_write_bytes=max_write_bytes)
        self._running: list[Sequence] = []  # by order, oldest first
        self._live: dict[str, Sequence] = {}
        self._num_live_of: dict[str, int] = {}  # adapter digest -> live sequences

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def service_gap(self) -> float:
        """How far the weighted service of tenants that wait is apart, in prompt tokens."""
        return self._queue.gap()

    def service(self) -> TenantService:
        """What tenants were served here, and which of them wait; any thread may ask."""
        return self._queue.service()

    def hear_elsewhere(self, served: Mapping[str, float], *, continues: bool) -> None:
        """`FairQueue.hear_elsewhere`."""
        self._queue.hear_elsewhere(served, continues=continues)

    def num_live_of(self, digest: str) -> int:
        """Live sequences of an adapter, waiting ones included."""
        return self._num_live_of.get(digest, 0)

    def add(self, sequence: Sequence) -> TokenChunk | None:
        """Queue a sequence. One that was already complete when it was resumed is answered at once."""
        reason = sequence.finish_reason()
        if reason is not None:
            sequence.status = Status.FINISHED
            return self._last_chunk(sequence, reason)
        self._live[sequence.request_id] = sequence
        if sequence.adapter_digest is not None:
            self._num_live_of[sequence.adapter_digest] = self._num_live_of.get(sequence.adapter_digest, 0) + 1
        self._queue.push(sequence)
        self._admission.reopen()
        return None

    def end(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> TokenChunk | None:
        """End a live sequence early and give back what it holds; None if there is none (it has just finished)."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._give_back(sequence)
        else:
            self._admission.leave(sequence)
        self._meter.num_aborted += 1
        self._forget(sequence)
        return self._last_chunk(sequence, reason, error=error)

    def reopen(self) -> None:
        """What the adapter tables hold has changed: waiting sequences may start, or are to be refused."""
        self._admission.reopen()

    def end_adapter(self, digest: str, error: Exception) -> list[TokenChunk]:
        """End an adapter's live sequences with this error; returns their last chunks."""
        live = [request_id for request_id, sequence in self._live.items() if sequence.adapter_digest == digest]
        return [chunk for request_id in live if (chunk := self.end(request_id, "error", error)) is not None]

    def schedule(self) -> Schedule:
        """Plan one step. Blocks for every planned token are held afterwards."""
        items: list[tuple[Sequence, int]] = []
        prefills: list[Sequence] = []
        block_size = self._blocks.block_size
        room_of = self._wide() if self._has_memory else {}
        favoured, displaced = self._make_places(room_of)
        preempted: list[Sequence] = []
        left_out = self._take_turns(room_of)
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            sequence.num_drafted = 0  # of a step that was planned and could not be computed
            if sequence.num_tokens - sequence.num_computed > 1 or not sequence.has_memory:
                prefills.append(sequence)
                continue
            if left_out and sequence.request_id in left_out:
                continue
            if sequence.num_computed == sequence.num_blocks * block_size and not self._grow(sequence, preempted):
                index -= 1  # it is not among them any more
                continue
            items.append((sequence, 1))
        num_paced = sum(sequence.tenant_id not in room_of for sequence, _ in items) if room_of else len(items)
        budget = self._pace.max_tokens(num_paced, self._max_tokens - len(items))  # wide tenants' streams hold up nobody
        prefills = [sequence for sequence in prefills if sequence.status is Status.RUNNING]
        counts = self._split(prefills, budget)
        keep_room(prefills, counts, room_of)
        budget -= sum(counts)
        writes: list[AdapterWrite] = []
        refusals: list[Refusal] = []
        if budget > 0 and not preempted:
            room = self._max_sequences - len(self._running)
            num_batches = sum(sequence.request.is_batch for sequence in self._running)
            batch_room = max(1, self._max_sequences // 2) - num_batches
            admitted, writes, refusals = self._admission.admit(
                room, budget, len(self._running), max(0, batch_room), room_of, favoured
            )
            for sequence in admitted:
                count = min(sequence.num_pending, budget, room_of.get(sequence.tenant_id, budget))
                if not count:
                    continue
                items.append((sequence, count))
                budget -= count
                if sequence.tenant_id in room_of:
                    room_of[sequence.tenant_id] -= count
            if admitted:
                self._running += admitted
                self._running.sort(key=_order)
        spend_rest(prefills, counts, budget, room_of)
        items += [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]
        assert items or refusals or not self._queue or self._adapters.num_referenced, (
            "with nothing running, and no adapter being brought, the first in the queue always fits"
        )
        items = self._speculator.plan(items, len(self._running))
        items.sort(key=_adapter_slot)
        return Schedule(items, writes, displaced + preempted, refusals)

    def commit(self, plan: Schedule, output: ForwardOutput | None) -> list[TokenChunk]:
        """Book a computed step: tokens, full blocks, charges, ends. One chunk per sequence that drew a token, or was
        embedded.

        Without output nothing was computed, and there is nothing to book.
        A sequence whose output overflowed, or whose grammar cannot go on, ends with an error, and what it computed in
        this step is not shared.
        """
        chunks: list[TokenChunk] = []
        if output is None:
            return chunks
        row = num_pooled = 0
        num_finished = self._meter.num_finished
        for sequence, count in plan.items:
            self._meter.num_tokens_computed += count
            if sequence.pooling is None:
                num_rows = 1 + sequence.num_drafted
                is_complete = sequence.num_computed + count == sequence.num_tokens + sequence.num_drafted
                chunk = self._commit_text(sequence, count, output, row if is_complete else None)
                row += num_rows * is_complete
            else:
                chunk = self._commit_pooled(sequence, count, output, num_pooled)
                num_pooled += 1
            if chunk is not None:
                chunks.append(chunk)
        assert row == len(output.token_ids), "the backend drew a token for every sample row and no other"
        if self._meter.num_finished != num_finished:
            self._running = [sequence for sequence in self._running if sequence.status is Status.RUNNING]
            self._queue.forget_absent({sequence.tenant_id for sequence in self._running})
        self._meter.num_steps += 1
        return chunks

    def check(self) -> None:
        """Assert that blocks, references and counts are accounted for; for tests."""
        self._blocks.check()
        self._adapters.check()
        assert len(self._running) + len(self._queue) == len(self._live)
        assert self._running == sorted(self._running, key=_order)
        held: dict[int, int] = {}
        refs: dict[str, int] = {}
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            for block in sequence.held_blocks():
                held[block] = held.get(block, 0) + 1
            if sequence.adapter_digest is not None:
                refs[sequence.adapter_digest] = refs.get(sequence.adapter_digest, 0) + 1
        assert {b: n for b, n in enumerate(self._blocks.num_refs()) if n} == held
        assert {entry.digest: entry.num_refs for entry in self._adapters.residents() if entry.num_refs} == refs
        assert sum(self._num_live_of.values()) == sum(1 for s in self._live.values() if s.adapter is not None)

    def _commit_text(
        self, sequence: Sequence, count: int, output: ForwardOutput, first_row: int | None
    ) -> TokenChunk | None:
        """`first_row`: where the output has what follows the sequence's tokens; None while its prompt is computed."""
        before = sequence.num_computed
        after = sequence.num_computed = before + count - sequence.num_drafted
        failure = sequence.constraint.error if sequence.constraint is not None else None
        if failure is not None or first_row in output.overflowed:
            return self.end(sequence.request_id, "error", failure or overflow_error(sequence))
        token_ids = () if first_row is None else self._take(sequence, output, first_row)
        sequence.num_computed = max(after, before + len(token_ids))
        self._publish(sequence, before)
        if first_row is None:
            return None
        logprobs = logprobs_of(output, first_row, token_ids) if sequence.wants_logprobs else ()
        if token_ids[-1] in sequence.stop_ids or sequence.num_output >= sequence.max_tokens:
            reason = sequence.finish_reason()
            assert reason is not None
            return self._finish(sequence, reason, token_ids, logprobs)
        is_first = sequence.num_tokens == sequence.num_given + len(token_ids)
        return TokenChunk(sequence.request_id, token_ids, logprobs, usage=sequence.usage() if is_first else None)

    def _commit_pooled(self, sequence: Sequence, count: int, output: ForwardOutput, index: int) -> TokenChunk | None:
        """`index`: the sequence's place among those that the step pools."""
        before = sequence.num_computed
        sequence.num_computed = before + count
        is_complete = sequence.num_computed == sequence.num_tokens
        vector = pooled(sequence, output, index, is_complete=is_complete)
        if vector is None:
            return self.end(sequence.request_id, "error", overflow_error(sequence))
        self._publish(sequence, before)
        return self._finish(sequence, "stop", vector=vector) if is_complete else None

    def _take(self, sequence: Sequence, output: ForwardOutput, first_row: int) -> tuple[int, ...]:
        """The tokens that a sequence's rows add to its answer: charged one by one, wrong guesses as what they cost."""
        verified = self._speculator.verify(sequence, output, first_row)
        for _ in verified.token_ids:
            self._meter.generated(sequence.tenant_id)
            self._queue.charge_token(sequence)
        if verified.num_wrong:
            self._queue.charge(sequence, INPUT_PRICE * verified.num_wrong)
        return verified.token_ids

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """One more block, from the free ones or from others behind it; False if it had to give way itself."""
        while True:
            blocks = self._blocks.allocate(1)
            if blocks is not None:
                sequence.count_held(self._meter.now_s)
                sequence.add_blocks(blocks)
                return True
            victim = self._youngest(sequence)
            self._running.remove(victim)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False

    def _youngest(self, sequence: Sequence) -> Sequence:
        """Of those that are not planned yet, `sequence` the first of them: the last batch's, or else the last."""
        for other in reversed(self._running):
            if other.request.is_batch:
                return other
            if other is sequence:
                break
        return self._running[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self._queue.push_preempted(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It does not run any more, and has to be queued."""
        self._give_back(sequence)
        sequence.forget_memory()
        sequence.status = Status.WAITING
        self._meter.num_preemptions += 1

    def _publish(self, sequence: Sequence, before: int) -> None:
        """Share the blocks that the step has filled; `before` it so many tokens were computed."""
        first, end = before // self._blocks.block_size, sequence.num_computed // self._blocks.block_size
        if first == end or not sequence.has_memory:
            return
        hashes = sequence.extend_hashes(end)
        for index in range(first, end):
            self._blocks.publish(
                int(sequence.block_table[index]), hashes[index], sequence.block_bytes(index),
                is_head=index == self._head_index,
            )  # fmt: skip

    def _give_back(self, sequence: Sequence) -> None:
        """Return blocks and adapter of a sequence that stops running; its order of arrival is kept."""
        sequence.count_held(self._meter.now_s)
        self._blocks.release(sequence.held_blocks())
        if sequence.adapter_digest is not None:
            self._adapters.release(sequence.adapter_digest)
        self._admission.reopen()

    def _forget(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        sequence.adapter = None  # the batch builder may remember the sequence for as long as nothing runs
        del self._live[sequence.request_id]
        digest = sequence.adapter_digest
        if digest is not None:
            self._num_live_of[digest] -= 1
            if not self._num_live_of[digest]:
                del self._num_live_of[digest]

    def _wide(self) -> dict[str, int]:
        """`Isolation.wide` of those that run and wait."""
        if not self._isolation.is_on:
            return {}
        return self._isolation.wide(self._running, self._queue.first_of_each(), self._queue.counter_of)

    def _make_places(self, wide: dict[str, int]) -> tuple[list[Sequence], list[Sequence]]:
        """Where all places are taken, wide tenants' youngest give theirs to the first request of each other tenant.

        What they had computed mostly stays in the prefix cache, and they go on when a place is free. Returns for whom
        there is a place now, and who gave it.
        """
        favoured: list[Sequence] = []
        displaced: list[Sequence] = []
        num_free = self._max_sequences - len(self._running)
        least = self._queue.least_waiting() if wide else 0.0
        for asking in self._queue.first_of_each() if wide else ():
            num_free -= 1
            if num_free >= 0:
                continue
            giver = self._isolation.giver(self._running, asking, wide, self._queue.counter_of, least)
            if giver is None:
                continue
            self._running.remove(giver)
            self._stop(giver)
            self._queue.push_back(giver)
            displaced.append(giver)
            favoured.append(asking)
        return favoured, displaced

    def _take_turns(self, room_of: dict[str, int]) -> set[str]:
        """Request ids of wide tenants' streams that wait for another step; what is left of the room goes to prompts.

        `room_of`, tokens by tenant, is written in place. While a tenant has prompts to compute they keep half of it.
        """
        left_out: set[str] = set()
        for tenant_id, room in room_of.items():
            mine = [sequence for sequence in self._running if sequence.tenant_id == tenant_id]
            decoding = [each for each in mine if each.num_tokens - each.num_computed == 1]
            number = min(len(decoding), room if len(decoding) == len(mine) else max(room // 2, 1))
            chosen = self._isolation.turn(decoding, number)
            left_out |= {each.request_id for each in decoding} - {each.request_id for each in chosen}
            room_of[tenant_id] = max(room - number, int(number == 0))
        return left_out

    def _split(self, prefills: list[Sequence], budget: int) -> list[int]:
        """Tokens of each. Without KV memory a text is computed whole; all fitted into one step when they started."""
        if not self._has_memory:
            return [sequence.num_pending for sequence in prefills]
        return split_prefill(prefills, budget, self._queue.waiting_tenants())

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        vector: bytes = b"",
    ) -> TokenChunk:
        """The last chunk of a running sequence that has all it wanted; what it held is given back."""
        self._give_back(sequence)
        self._forget(sequence)
        self._meter.num_finished += 1
        return self._last_chunk(sequence, reason, token_ids, logprobs, vector=vector)

    def _last_chunk(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        error: Exception | None = None,
        vector: bytes = b"",
    ) -> TokenChunk:
        matched_stop = sequence.matched_stop() if reason == "stop" else None
        usage, consumption = sequence.usage(), sequence.consumption()
        self._meter.ended(sequence.tenant_id, consumption)
        return TokenChunk(
            sequence.request_id, token_ids, logprobs, reason, matched_stop, usage, error, vector, consumption
        )


def _order(sequence: Sequence) -> int:
    assert sequence.order is not None, "a running sequence was admitted"
    return sequence.order


def _adapter_slot(item: tuple[Sequence, int]) -> int:
    return item[0].adapter_slot
