"""The live sequences of one engine: the running ones, and what happens to their memory when they stop.

A sequence is live from the step that queues it until its last chunk. While it runs it holds blocks and a reference on
its adapter's rows; both are released when it ends or is preempted, and then waiting sequences may start.
"""

from __future__ import annotations

from app.engine.meter import EngineMeter
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import FinishReason, TokenChunk, TokenLogprobs
from app.engine.scheduling.admission import Admission
from app.engine.sequence import Sequence, Status


class LiveSequences:
    """All live sequences. `running` is in order of first admission, the oldest first."""

    def __init__(self, blocks: BlockPool, adapters: AdapterPool, meter: EngineMeter, admission: Admission) -> None:
        self._blocks = blocks
        self._adapters = adapters
        self._meter = meter
        self._admission = admission
        self._by_id: dict[str, Sequence] = {}
        self._num_of: dict[str, int] = {}  # adapter digest -> live sequences
        self.running: list[Sequence] = []

    def num_of(self, digest: str) -> int:
        """Live sequences of an adapter, waiting ones included."""
        return self._num_of.get(digest, 0)

    def get(self, request_id: str) -> Sequence | None:
        """A live sequence; None if it has ended or is unknown."""
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Register a new sequence."""
        self._by_id[sequence.request_id] = sequence
        digest = sequence.adapter_digest
        if digest is not None:
            self._num_of[digest] = self._num_of.get(digest, 0) + 1

    def run(self, admitted: list[Sequence]) -> None:
        """Start admitted sequences, which hold their blocks and rows."""
        for sequence in admitted:
            sequence.started_s = sequence.started_s or self._meter.now_s
        self.running += admitted
        self.running.sort(key=_order)

    def stop(self, sequence: Sequence) -> None:
        """Stop a running sequence and release what it holds; the caller queues it again."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.forget_memory()
        sequence.status = Status.WAITING
        self._meter.num_preemptions += 1

    def end(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> TokenChunk | None:
        """End a live sequence early and release what it holds; None if it has just finished or is unknown."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self._admission.cancel(sequence)
        self._meter.num_aborted += 1
        self._forget(sequence)
        return self.last_chunk(sequence, reason, error=error)

    def end_new(self, request_id: str, error: Exception) -> TokenChunk | None:
        """End a sequence that was never admitted; None if it was, or is unknown."""
        sequence = self._by_id.get(request_id)
        return self.end(request_id, "error", error) if sequence is not None and sequence.order is None else None

    def end_adapter(self, digest: str, error: Exception) -> list[TokenChunk]:
        """End an adapter's live sequences with this error; returns their last chunks."""
        live = [request_id for request_id, sequence in self._by_id.items() if sequence.adapter_digest == digest]
        return [chunk for request_id in live if (chunk := self.end(request_id, "error", error)) is not None]

    def reopen(self) -> None:
        """Let admission look again: the adapter tables have changed."""
        self._admission.reopen()

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        vector: bytes = b"",
    ) -> TokenChunk:
        """The last chunk of a complete running sequence; it stays in `running` until `drop_finished`."""
        self._give_back(sequence)
        self._forget(sequence)
        self._meter.num_finished += 1
        return self.last_chunk(sequence, reason, token_ids, logprobs, vector=vector)

    def drop_finished(self) -> None:
        """Remove the finished sequences from `running`."""
        self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]

    def last_chunk(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        error: Exception | None = None,
        vector: bytes = b"",
    ) -> TokenChunk:
        """The chunk that ends a sequence, with its usage."""
        matched_stop = sequence.matched_stop() if reason == "stop" else None
        usage, request_usage = sequence.usage(), sequence.request_usage()
        self._meter.count_usage(request_usage)
        return TokenChunk(
            sequence.request_id, token_ids, logprobs, reason, matched_stop, usage, error, vector, request_usage,
            timing=sequence.timing(self._meter.now_s),
        )  # fmt: skip

    def check(self, num_waiting: int) -> None:
        """Assert that blocks, references and counts are accounted for; for tests."""
        assert len(self.running) + num_waiting == len(self._by_id)
        assert self.running == sorted(self.running, key=_order)
        held: dict[int, int] = {}
        refs: dict[str, int] = {}
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            for block in sequence.held_blocks():
                held[block] = held.get(block, 0) + 1
            if sequence.adapter_digest is not None:
                refs[sequence.adapter_digest] = refs.get(sequence.adapter_digest, 0) + 1
        assert {b: n for b, n in enumerate(self._blocks.num_refs()) if n} == held
        assert {entry.digest: entry.num_refs for entry in self._adapters.residents() if entry.num_refs} == refs
        assert sum(self._num_of.values()) == sum(1 for s in self._by_id.values() if s.adapter is not None)

    def _give_back(self, sequence: Sequence) -> None:
        """Release the blocks and the adapter of a sequence that stops running."""
        sequence.count_held(self._meter.now_s)
        self._blocks.release(sequence.held_blocks())
        if sequence.adapter_digest is not None:
            self._adapters.release(sequence.adapter_digest)
        self._admission.reopen()

    def _forget(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        sequence.adapter = None  # the batch builder may keep the sequence while nothing runs
        del self._by_id[sequence.request_id]
        digest = sequence.adapter_digest
        if digest is not None:
            self._num_of[digest] -= 1
            if not self._num_of[digest]:
                del self._num_of[digest]


def _order(sequence: Sequence) -> int:
    assert sequence.order is not None, "a running sequence was admitted"
    return sequence.order
