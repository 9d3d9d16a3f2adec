"""The scheduler in front of vLLM: who enters it next, and what its outputs mean for our books.

Fair order, places, batch class and adapter slots are decided by `app.engine.scheduling`, as for our own engines; vLLM
batches what has entered and keeps the KV memory. A sequence holds no blocks here: its share of vLLM's KV memory is
estimated from its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from app.engine.batch import ForwardOutput
from app.engine.errors import EngineFailure, InvalidRequest, PolyloraError
from app.engine.request import PoolingParams, TokenChunk, TokenLogprobs
from app.engine.scheduling.fair_queue import HELD_BLOCK_PRICE, INPUT_PRICE
from app.engine.scheduling.schedule import Schedule
from app.engine.scheduling.scheduler import Scheduler, embedding, overflow_error
from app.engine.sequence import Sequence, Status
from app.engine.vllm.worker_process import Frame
from app.engine.warm_up import WARM_UP

#: While several tenants send requests, this part of the places, at least one, is not for the tenant that runs most.
RESERVED_SHARE = 1 / 16
#: A tenant counts as sending requests for so long after its last one.
RECENT_S = 60.0
#: While others run, a batch sequence starts only below this use of the KV memory.
MAX_BATCH_KV_USAGE = 3 / 4


class WorkerUsage(NamedTuple):
    """vLLM's own numbers, from its last outputs. `kv_usage`: the used part of its KV memory."""

    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_waiting: int = 0


class VllmScheduler(Scheduler):
    """Waiting sequences here, and running ones: admitted (`unsent`) or in vLLM (`sent`)."""

    def __init__(self, *pools: Any, **limits: Any) -> None:
        super().__init__(*pools, **limits)
        #: Takes the frames of outputs that have arrived since its last call.
        self.take_outputs: Callable[[], list[Frame]] = list
        self.unsent: dict[str, Sequence] = {}  # by request id
        self.sent: dict[str, Sequence] = {}  # by `wire_id`
        self.usage = WorkerUsage()
        self._last_request_s: dict[str, float] = {}  # by tenant, the latest last

    def add(self, sequence: Sequence) -> TokenChunk | None:
        """Queue a sequence; vLLM has its KV memory."""
        sequence.has_memory = False
        if sequence.tenant_id != WARM_UP:
            self._last_request_s.pop(sequence.tenant_id, None)
            self._last_request_s[sequence.tenant_id] = self._meter.now_s
        return super().add(sequence)

    def schedule(self) -> Schedule:
        """Admit what has a place, KV memory and a slot. The items are the sequences that vLLM does not have yet."""
        running = self.live.running
        capacity = self._blocks.num_blocks * self._blocks.block_size
        known = sum(sequence.num_tokens for sequence in running)
        kv_room = max(capacity - known, int((1 - self.usage.kv_usage) * capacity)) if running else capacity
        batch_room = max(1, self._max_sequences // 2) - sum(sequence.request.is_batch for sequence in running)
        if running and self.usage.kv_usage > MAX_BATCH_KV_USAGE:
            batch_room = 0
        room = self._max_sequences - len(running)
        admitted, writes, refusals = self._admission.admit(
            room, kv_room, len(running), max(0, batch_room), places_of=self._places_of()
        )
        self.live.run(admitted)
        self.unsent |= {sequence.request_id: sequence for sequence in admitted}
        self.unsent = {key: each for key, each in self.unsent.items() if each.status is Status.RUNNING}
        items = [(sequence, sequence.num_tokens) for sequence in self.unsent.values()]
        return Schedule(items, writes, refusals, [sequence.request_id for sequence in admitted])

    def _places_of(self) -> dict[str, int]:
        """How many more sequences each waiting tenant may run while others send requests, too: a stream in vLLM cannot
        give its place to another tenant's, so some places stay free for the others."""
        latest = self._last_request_s
        while latest and latest[first := next(iter(latest))] < self._meter.now_s - RECENT_S:
            del latest[first]
        widths = Counter(sequence.tenant_id for sequence in self.live.running if not sequence.request.is_batch)
        if len(latest.keys() | widths.keys()) < 2:
            return {}
        limit = self._max_sequences - max(int(RESERVED_SHARE * self._max_sequences), 1)
        return {tenant_id: max(limit, 1) - widths[tenant_id] for tenant_id in self.queue.waiting_tenants()}

    def mark_sent(self, sequence: Sequence) -> None:
        """vLLM has the sequence now, under its `wire_id`."""
        self.sent[wire_id(sequence)] = self.unsent.pop(sequence.request_id)

    def commit(self, schedule: Schedule, output: ForwardOutput | None) -> list[TokenChunk]:  # noqa: ARG002
        """Account for the outputs that have arrived; `output` is None, as vLLM's come later than the step."""
        chunks: list[TokenChunk] = []
        num_ended = self._meter.num_finished + self._meter.num_aborted
        for frame in self.take_outputs():
            self.usage = WorkerUsage(frame["kv_usage"], frame["num_preemptions"], frame["num_waiting"])
            self._meter.num_preemptions = self.usage.num_preemptions
            self._meter.num_steps += 1
            for line in frame["outputs"]:
                sequence = self.sent.get(line["id"])
                if sequence is not None:  # else aborted
                    chunks.append(self._commit_line(sequence, line))
        if self._meter.num_finished + self._meter.num_aborted != num_ended:
            self.live.drop_finished()
            self.queue.forget_absent({sequence.tenant_id for sequence in self.live.running})
        return chunks

    def _commit_line(self, sequence: Sequence, line: Frame) -> TokenChunk:
        """The chunk of one output of vLLM's."""
        reason = line.get("finish")
        if "error" in line or reason not in {None, "stop", "length"}:
            return self._end(sequence, _error_of(line))
        if sequence.num_computed == 0:
            self._count_cached(sequence, line["cached"] or 0)
        if sequence.request.pooling is not None:
            return self._commit_embedding(sequence, sequence.request.pooling, line["embedding"])
        token_ids = tuple(line["tokens"]) if sequence.max_tokens > 0 else ()
        self._count_held(sequence)
        is_first = sequence.num_computed == 0
        self._meter.num_tokens_computed += sequence.num_tokens if is_first else len(token_ids)
        for token_id in token_ids:
            sequence.append(token_id)
            self._meter.num_tokens_generated += 1
            self.queue.charge_token(sequence)
        self.queue.charge(sequence, HELD_BLOCK_PRICE * self._num_blocks(sequence) * len(token_ids))
        sequence.num_computed = sequence.num_tokens
        logprobs = tuple(
            TokenLogprobs(token_id, value, tuple((other, its) for other, its in top))
            for token_id, (value, top) in zip(token_ids, line["logprobs"] or (), strict=False)
        )
        sequence.prompt_logprobs += [
            TokenLogprobs(token_id, value, tuple((other, its) for other, its in top), rank)
            for token_id, (value, rank, top) in zip(
                sequence.request.token_ids[1:], line.get("prompt_logprobs") or (), strict=False
            )
        ]
        if reason is not None:
            del self.sent[wire_id(sequence)]
            chunk = self.live.finish(sequence, reason, token_ids, logprobs)
        else:
            usage, timing = (sequence.usage(), sequence.timing(self._meter.now_s)) if is_first else (None, None)
            chunk = TokenChunk(sequence.request_id, token_ids, logprobs, usage=usage, timing=timing)
        return self.with_prompt_logprobs(sequence, chunk)

    def _commit_embedding(self, sequence: Sequence, pooling: PoolingParams, values: bytes) -> TokenChunk:
        """The chunk of a pooled text. `values`: little-endian float32 [H], not normalised."""
        del self.sent[wire_id(sequence)]
        self._count_held(sequence)
        self._meter.num_tokens_computed += sequence.num_tokens
        sequence.num_computed = sequence.num_tokens
        vector = embedding(np.frombuffer(values, "<f4").astype(np.float64), 1, pooling)
        if vector is not None:
            return self.live.finish(sequence, "stop", vector=vector)
        chunk = self.live.end(sequence.request_id, "error", overflow_error(sequence))
        assert chunk is not None, "a sent sequence is live"
        return chunk

    def _end(self, sequence: Sequence, error: PolyloraError) -> TokenChunk:
        del self.sent[wire_id(sequence)]
        chunk = self.live.end(sequence.request_id, "error", error)
        assert chunk is not None, "a sent sequence is live"
        return chunk

    def _count_cached(self, sequence: Sequence, num_cached: int) -> None:
        """vLLM found part of the prompt in its cache: the tenant gets its price back."""
        num_cached = min(num_cached, sequence.num_prompt)
        if sequence.num_cached or not num_cached:
            return
        sequence.num_cached = num_cached
        if sequence.request.num_charged is None:
            self._meter.num_cached_tokens += num_cached
        self.queue.charge(sequence, -INPUT_PRICE * num_cached)

    def _count_held(self, sequence: Sequence) -> None:
        now_s = self._meter.now_s
        sequence.block_seconds += self._num_blocks(sequence) * (now_s - sequence.held_since_s)
        sequence.count_held(now_s)

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self._blocks.block_size)


def wire_id(sequence: Sequence) -> str:
    """A request's name in vLLM: a request that is sent again after an abort has another one."""
    return f"{sequence.request_id}#{sequence.order}"


def _error_of(line: Frame) -> PolyloraError:
    if "error" not in line:
        return EngineFailure(f"vLLM ended the request with finish reason {line['finish']!r}")
    if line["kind"] == "invalid":
        return InvalidRequest(f"vLLM refuses the request: {line['error']}")
    return EngineFailure(f"vLLM failed on the request: {line['error']}")
