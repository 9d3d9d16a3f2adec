"""The few shapes that a step may have, and their compiled programs.

Programs are compiled ahead of time, so nothing compiles by accident, and compilations are counted. At start the largest
bucket, which holds every step, is compiled first; a background thread compiles the others, which are used as they
become ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from app.engine.config import EngineConfig
from app.engine.xla.step import PREFILL_TILE, Bucket

Compile = Callable[[Bucket], Any]


def ladder(config: EngineConfig, table_width: int) -> tuple[Bucket, ...]:
    """All buckets, smallest first; the last one holds any step of the engine.

    Decode steps (one token per sequence): 2, 8, 32, 128, ... sequences. Steps with prompts: few tokens of few
    sequences, up to `max_num_batched_tokens` of `max_num_seqs`.
    """
    most_tokens, most_sequences = max(config.max_num_batched_tokens, 2), max(config.max_num_seqs, 2)
    sequences = [4**k * 2 for k in range(10) if 4**k * 2 < most_sequences] + [most_sequences]
    buckets = {Bucket(count, count, 1, table_width) for count in sequences if count <= most_tokens}
    shapes = ((64, 8), (128, 32), (most_tokens, 8), (most_tokens, most_sequences))
    for tokens, count in shapes:
        if tokens <= most_tokens:
            buckets.add(Bucket(tokens, min(count, most_sequences), PREFILL_TILE, table_width))
    return tuple(sorted(buckets))


class Programs:
    """Compiled programs by bucket; `compile_one` is called once per bucket."""

    def __init__(self, buckets: Iterable[Bucket], compile_one: Compile, *, skip_precompile: bool) -> None:
        self.buckets = tuple(sorted(buckets))
        self._compile_one = compile_one
        self._ready: dict[Bucket, Any] = {}
        self._lock = threading.Lock()  # one compilation at a time; readers do not take it
        self._lazy = skip_precompile
        self._stopped = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self.compile_s_by_bucket: dict[Bucket, float] = {}
        if not skip_precompile:
            self._compile(self.buckets[-1])
            self._thread = threading.Thread(target=self._compile_rest, name="jax-precompile", daemon=True)
            self._thread.start()

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling."""
        return sum(self.compile_s_by_bucket.copy().values())

    def wait(self) -> None:
        """Wait until every program is ready; raises the error of a failed compilation."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop compiling; returns after the running compilation."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def find(self, num_tokens: int, num_sequences: int, *, decode: bool) -> tuple[Bucket, Any]:
        """The smallest bucket that holds the step, or the smallest compiled one, and its program."""
        holds = [
            bucket
            for bucket in self.buckets
            if bucket.tokens >= num_tokens
            and bucket.sequences >= num_sequences
            and (decode or bucket.tile == PREFILL_TILE)
        ]
        assert holds, "the last bucket holds every step the engine builds"
        if self._failure is not None:
            raise self._failure
        if self._lazy:
            self._compile(holds[0])
        for bucket in holds:
            program = self._ready.get(bucket)
            if program is not None:
                return bucket, program
        raise AssertionError("the last bucket is compiled first")

    def program(self, bucket: Bucket) -> Any:
        """One bucket's program, compiled now if it is not ready."""
        self._compile(bucket)
        return self._ready[bucket]

    def _compile(self, bucket: Bucket) -> None:
        with self._lock:
            if bucket not in self._ready:
                start = time.perf_counter()
                program = self._compile_one(bucket)
                self.compile_s_by_bucket[bucket] = time.perf_counter() - start
                self._ready[bucket] = program

    def _compile_rest(self) -> None:
        try:
            for bucket in self.buckets:
                if self._stopped:
                    return
                self._compile(bucket)
        except Exception as error:  # passed to the thread that owns the device, which ends its streams with it
            self._failure = error
