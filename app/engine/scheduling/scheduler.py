"""The scheduler: continuous batching with chunked prefill.

It makes a `Schedule` per step and turns the step's output into chunks. Every decoding sequence gets its token first;
prefill chunks and newly admitted sequences share the rest of the token budget, at most what the prefill budget allows.
When blocks run out, the youngest sequence, batch ones before others, releases all of its blocks and is recomputed later
(preemption by recompute). The oldest always finishes, so every sequence does. Arrays are the batch builder's, memory is
the pools'.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters import score_head
from app.engine.batch import ForwardOutput
from app.engine.errors import AdapterOverflow, EngineFailure
from app.engine.meter import EngineMeter
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool, num_prefix_blocks
from app.engine.request import PoolingParams, TokenChunk, TokenLogprobs
from app.engine.scheduling.admission import Admission
from app.engine.scheduling.chunked_prefill import (
    PrefillBudget,
    fill_prefill,
    limit_prefill,
    limit_scored,
    split_prefill,
)
from app.engine.scheduling.fair_queue import INPUT_PRICE, FairQueue
from app.engine.scheduling.live_sequences import LiveSequences
from app.engine.scheduling.schedule import AdapterWrite, Refusal, Schedule
from app.engine.scheduling.tenant_isolation import TenantIsolation
from app.engine.sequence import Sequence, Status
from app.engine.spec_decode.spec_decoder import SpecDecoder


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(
        self,
        blocks: BlockPool,
        adapters: AdapterPool,
        meter: EngineMeter,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_write_bytes: int,
        prefill_budget: PrefillBudget,
        tenant_isolation: TenantIsolation,
        spec_decoder: SpecDecoder,
    ) -> None:
        self._blocks = blocks
        self._has_memory = blocks.num_blocks > 0
        self._prefix_end_block = num_prefix_blocks(blocks.block_size) - 1
        self._adapters = adapters
        self._meter = meter
        self._max_tokens = max_num_batched_tokens
        self._max_sequences = min(max_num_seqs, max_num_batched_tokens)  # each decodes one token per step
        self._prefill_budget = prefill_budget
        self._isolation = tenant_isolation
        self._spec_decoder = spec_decoder
        self.queue = FairQueue()
        self._admission = Admission(self.queue, blocks, adapters, meter, max_write_bytes=max_write_bytes)
        self.live = LiveSequences(blocks, adapters, meter, self._admission)

    @property
    def num_running(self) -> int:
        return len(self.live.running)

    def add(self, sequence: Sequence) -> TokenChunk | None:
        """Queue a sequence. A resumed one that is already complete is answered at once."""
        reason = sequence.finish_reason()
        if reason is not None:
            sequence.status = Status.FINISHED
            return self.live.last_chunk(sequence, reason)
        self.live.add(sequence)
        self.queue.push(sequence)
        self._admission.reopen()
        return None

    def schedule(self) -> Schedule:
        """Schedule one step. Afterwards the blocks of all its tokens are held."""
        items: list[tuple[Sequence, int]] = []
        prefills: list[Sequence] = []
        block_size = self._blocks.block_size
        running, queue = self.live.running, self.queue
        token_limit_of: dict[str, int] = {}
        preferred: list[Sequence] = []
        if self._isolation.is_on and self._has_memory:
            token_limit_of = self._isolation.token_limits(running, queue.first_of_each(), queue.counter_of)
        num_free = self._max_sequences - len(running)
        if num_free < len(queue.waiting_tenants()) and self._has_memory:
            heavy = token_limit_of or self._isolation.heavy_tenants(running, queue.first_of_each())
            preferred = self._isolation.displace_for_waiting(running, queue, heavy, num_free, self._displace)
        preempted: list[Sequence] = []
        skipped = self._isolation.throttle_decoding(running, token_limit_of)
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            sequence.num_draft_tokens = 0  # left from a step that was scheduled but not computed
            if sequence.num_pending > 1 or not sequence.has_memory:
                prefills.append(sequence)
                continue
            if skipped and sequence.request_id in skipped:
                continue
            if sequence.num_computed == sequence.num_blocks * block_size and not self._grow(sequence, preempted):
                index -= 1  # it was removed from `running`
                continue
            items.append((sequence, 1))
        num_decoding = len(items)
        if token_limit_of:  # the streams of heavy tenants do not reduce the prefill budget
            num_decoding = sum(sequence.tenant_id not in token_limit_of for sequence, _ in items)
        budget = self._prefill_budget.max_tokens(num_decoding, self._max_tokens - len(items))
        prefills = [sequence for sequence in prefills if sequence.status is Status.RUNNING]
        counts = self._split(prefills, budget)
        limit_prefill(prefills, counts, token_limit_of)
        budget -= sum(counts)
        writes: list[AdapterWrite] = []
        refusals: list[Refusal] = []
        admitted: list[Sequence] = []
        if budget > 0 and not preempted:
            room = self._max_sequences - len(running)
            num_batches = sum(sequence.request.is_batch for sequence in running)
            batch_room = max(1, self._max_sequences // 2) - num_batches
            admitted, writes, refusals = self._admission.admit(
                room, budget, len(running), max(0, batch_room), token_limit_of, preferred
            )
            for sequence in admitted:
                count = min(sequence.num_pending, budget, token_limit_of.get(sequence.tenant_id, budget))
                if not count:
                    continue
                items.append((sequence, count))
                budget -= count
                if sequence.tenant_id in token_limit_of:
                    token_limit_of[sequence.tenant_id] -= count
            if admitted:
                self.live.run(admitted)
        fill_prefill(prefills, counts, budget, token_limit_of)
        items += [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]
        limit_scored(items, self._max_sequences)
        # A tenant's only stream with a time slice may have been preempted: the tenant's others go on in the next step.
        assert items or refusals or preempted or not queue or self._adapters.num_referenced, (
            "with nothing running, and no adapter being loaded, the first in the queue always fits"
        )
        items = self._spec_decoder.add_drafts(items, len(running))
        items.sort(key=_adapter_slot)
        return Schedule(items, writes, refusals, [sequence.request_id for sequence in admitted])

    def observe(self, schedule: Schedule, took_s: float) -> None:
        """Update the time estimates with the duration of a computed step."""
        if any(sequence.num_draft_tokens for sequence, _ in schedule.items):
            return  # its time fits neither the estimate for prompts nor the one for single tokens
        prompt_counts = [count for _, count in schedule.items if count > 1]
        num_decoding = len(schedule.items) - len(prompt_counts)
        self._prefill_budget.observe(num_decoding, sum(prompt_counts), took_s)
        self._isolation.observe(num_decoding + sum(prompt_counts), took_s)

    def commit(self, schedule: Schedule, output: ForwardOutput | None) -> list[TokenChunk]:
        """Account for a computed step: tokens, full blocks, charges, ends. One chunk per sequence with a token or an
        embedding.

        `output` is None if nothing was computed. A sequence whose output overflowed, or whose grammar cannot go on,
        ends with an error, and its blocks of this step are not published.
        """
        chunks: list[TokenChunk] = []
        if output is None:
            return chunks
        row = num_pooled = 0
        num_finished = self._meter.num_finished
        for sequence, count in schedule.items:
            self._meter.num_tokens_computed += count
            if sequence.pooling is None:
                num_rows = 1 + sequence.num_draft_tokens
                num_scored = len(sequence.scored_tokens(sequence.num_computed, sequence.num_computed + count))
                is_complete = sequence.num_computed + count == sequence.num_tokens + sequence.num_draft_tokens
                scored = range(row, row + num_scored)
                row += num_scored
                chunk = self._commit_text(sequence, count, output, scored, row if is_complete else None)
                row += num_rows * is_complete
            else:
                chunk = self._commit_pooled(sequence, count, output, num_pooled)
                num_pooled += 1
            if chunk is not None:
                chunks.append(chunk)
        assert row == len(output.token_ids), "the backend drew a token for every sample row and no other"
        if self._meter.num_finished != num_finished:
            self.live.drop_finished()
            self.queue.forget_absent({sequence.tenant_id for sequence in self.live.running})
        self._meter.num_steps += 1
        return chunks

    def check(self) -> None:
        """Assert that blocks, references and counts are accounted for; for tests."""
        self._blocks.check()
        self._adapters.check()
        self.live.check(len(self.queue))

    def _commit_text(
        self, sequence: Sequence, count: int, output: ForwardOutput, scored: range, first_row: int | None
    ) -> TokenChunk | None:
        """scored: the output's rows of the sequence's prompt. first_row: its first row with a new token; None until its
        prompt is complete."""
        before = sequence.num_computed
        after = sequence.num_computed = before + count - sequence.num_draft_tokens
        failure = sequence.constraint.error if sequence.constraint is not None else None
        if failure is not None or first_row in output.overflowed or any(row in output.overflowed for row in scored):
            return self.live.end(sequence.request_id, "error", failure or overflow_error(sequence))
        sequence.prompt_logprobs += _prompt_logprobs_of(output, scored)
        has_token = first_row is not None and sequence.max_tokens > 0
        token_ids = self._accept_tokens(sequence, output, first_row) if has_token and first_row is not None else ()
        sequence.num_computed = max(after, before + len(token_ids))
        self._publish(sequence, before)
        if first_row is None:
            return None
        if not has_token:
            return self.with_prompt_logprobs(sequence, self.live.finish(sequence, "length"))
        logprobs = _logprobs_of(output, first_row, token_ids) if sequence.wants_logprobs else ()
        if token_ids[-1] in sequence.stop_ids or sequence.num_output >= sequence.max_tokens:
            reason = sequence.finish_reason()
            assert reason is not None
            return self.with_prompt_logprobs(sequence, self.live.finish(sequence, reason, token_ids, logprobs))
        is_first = sequence.num_tokens == sequence.num_given + len(token_ids)
        usage, timing = (sequence.usage(), sequence.timing(self._meter.now_s)) if is_first else (None, None)
        chunk = TokenChunk(sequence.request_id, token_ids, logprobs, usage=usage, timing=timing)
        return self.with_prompt_logprobs(sequence, chunk)

    def with_prompt_logprobs(self, sequence: Sequence, chunk: TokenChunk) -> TokenChunk:
        """The chunk with the log-probabilities of the prompt, if they have not been sent."""
        if not sequence.wants_prompt_logprobs:
            return chunk
        sequence.wants_prompt_logprobs = False
        return chunk._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))

    def _commit_pooled(self, sequence: Sequence, count: int, output: ForwardOutput, index: int) -> TokenChunk | None:
        """`index`: the sequence's place among the pooled ones of the step."""
        before = sequence.num_computed
        sequence.num_computed = before + count
        is_complete = sequence.num_computed == sequence.num_tokens
        vector = _pool_output(sequence, output, index, is_complete=is_complete)
        if vector is None:
            return self.live.end(sequence.request_id, "error", overflow_error(sequence))
        self._publish(sequence, before)
        return self.live.finish(sequence, "stop", vector=vector) if is_complete else None

    def _accept_tokens(self, sequence: Sequence, output: ForwardOutput, first_row: int) -> tuple[int, ...]:
        """Add the step's tokens to the answer and charge them; rejected draft tokens are charged like prompt tokens."""
        verified = self._spec_decoder.verify(sequence, output, first_row)
        for _ in verified.token_ids:
            self._meter.num_tokens_generated += 1
            self.queue.charge_token(sequence)
        if verified.num_rejected:
            self.queue.charge(sequence, INPUT_PRICE * verified.num_rejected)
        return verified.token_ids

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Allocate one more block, preempting younger sequences if none is free. False if it was preempted itself."""
        while True:
            blocks = self._blocks.allocate(1)
            if blocks is not None:
                sequence.count_held(self._meter.now_s)
                sequence.add_blocks(blocks)
                return True
            victim = self._youngest(sequence)
            self.live.stop(victim)
            self.queue.push_preempted(victim)
            preempted.append(victim)
            if victim is sequence:
                return False

    def _youngest(self, sequence: Sequence) -> Sequence:
        """The sequence to preempt, from `sequence` on: the youngest batch sequence, else the youngest."""
        for other in reversed(self.live.running):
            if other.request.is_batch:
                return other
            if other is sequence:
                break
        return self.live.running[-1]

    def _displace(self, sequence: Sequence) -> None:
        """Take a running sequence's place for another tenant's."""
        self.live.stop(sequence)
        self.queue.push_back(sequence)

    def _publish(self, sequence: Sequence, before: int) -> None:
        """Publish the blocks that this step has filled; `before` it so many tokens were computed."""
        first, end = before // self._blocks.block_size, sequence.num_computed // self._blocks.block_size
        if first == end or not sequence.has_memory:
            return
        hashes = sequence.extend_hashes(end)
        for index in range(first, end):
            self._blocks.publish(
                int(sequence.block_table[index]), hashes[index], sequence.block_bytes(index),
                ends_prefix=index == self._prefix_end_block,
            )  # fmt: skip

    def _split(self, prefills: list[Sequence], budget: int) -> list[int]:
        """Tokens per prompt. Without KV memory a text is computed whole; admission made sure that it fits."""
        if not self._has_memory:
            return [sequence.num_pending for sequence in prefills]
        return split_prefill(prefills, budget, self.queue.waiting_tenants())


def _adapter_slot(item: tuple[Sequence, int]) -> int:
    return item[0].adapter_slot


def _pool_output(sequence: Sequence, output: ForwardOutput, index: int, *, is_complete: bool) -> bytes | None:
    """Store a step's sums. Returns the embedding or scores when complete, b"" before, None if one is not finite."""
    assert sequence.pooling is not None
    assert output.sums is not None, "the backend has added up what was to be pooled"
    sequence.pooled_sums = output.sums[index]
    if not is_complete:
        return b""
    if sequence.pooling.task == "embed":
        return embedding(sequence.pooled_sums, sequence.num_tokens, sequence.pooling)
    assert sequence.adapter is not None, "the head is the adapter's"
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        scores = score_head.logits(sequence.adapter, sequence.pooled_sums).astype("<f4")
    return scores.tobytes() if np.isfinite(scores).all() else None


def overflow_error(sequence: Sequence) -> Exception:
    """The error of a sequence whose next token or embedding is not a finite number."""
    where = f"is not a finite number after {sequence.num_tokens} tokens"
    adapter = sequence.request.adapter
    if adapter is None:
        return EngineFailure(f"the output of the base model {where}")
    return AdapterOverflow(
        f"the output of adapter {adapter.name!r} {where}: its values are too large; lower alpha or train it again"
    )


def _logprobs_of(output: ForwardOutput, first_row: int, token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token_id, float(output.logprobs[row]), _top_of(output, row))
        for row, token_id in enumerate(token_ids, first_row)
    )


def _prompt_logprobs_of(output: ForwardOutput, rows: range) -> list[TokenLogprobs]:
    if not rows:
        return []
    assert output.ranks is not None, "the backend has seen the targets"
    return [
        TokenLogprobs(
            int(output.token_ids[row]), float(output.logprobs[row]), _top_of(output, row), int(output.ranks[row])
        )
        for row in rows
    ]


def _top_of(output: ForwardOutput, row: int) -> tuple[tuple[int, float], ...]:
    top = output.top_logprobs[row]
    return () if top is None else tuple(zip(top[0].tolist(), top[1].tolist(), strict=True))


def embedding(sums: NDArray[np.float64], num_tokens: int, params: PoolingParams) -> bytes | None:
    """The embedding of a text of `num_tokens`, as little-endian float32, from the sums [H] over its pooled rows.

    None if a number is not finite. A zero vector stays as it is. The length is an exact sum, rounded once.
    """
    vector = sums[: params.num_dimensions] / (num_tokens if params.method == "mean" else 1)
    if not np.isfinite(vector).all():
        return None
    length = math.sqrt(math.fsum((vector * vector).tolist()))
    return (vector / length if length > 0 else vector).astype("<f4").tobytes()
