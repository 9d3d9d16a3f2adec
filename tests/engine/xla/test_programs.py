"""The ladder of shapes holds every step; a second start reads its programs from disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.engine.config import EngineConfig
from app.engine.xla.programs import Programs, ladder
from app.engine.xla.step import PREFILL_TILE, Bucket

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("tokens", "sequences"), [(8, 1), (16, 3), (64, 64), (256, 64), (100, 7)])
def test_the_last_bucket_holds_every_step_and_the_smallest_is_chosen(tokens: int, sequences: int) -> None:
    config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=sequences)
    programs = Programs(ladder(config, 8), lambda bucket: bucket, skip_precompile=False)
    programs.wait()
    assert len(programs.compile_s_by_bucket) == len(programs.buckets) == len(set(programs.buckets))
    for num_sequences in range(1, min(sequences, tokens) + 1):
        for num_tokens in {num_sequences, tokens}:
            decode = num_tokens == num_sequences
            bucket, program = programs.find(num_tokens, num_sequences, decode=decode)
            assert program == bucket
            assert bucket.tokens >= num_tokens
            assert bucket.sequences >= num_sequences
            assert decode or bucket.tile == PREFILL_TILE


def test_a_step_runs_in_a_larger_bucket_while_its_own_is_compiling() -> None:
    may_go_on = threading.Event()
    buckets = [Bucket(2, 2, 1, 8), Bucket(64, 8, PREFILL_TILE, 8)]

    def compile_one(bucket: Bucket) -> Bucket:
        if bucket == buckets[0]:
            assert may_go_on.wait(600)
        return bucket

    programs = Programs(buckets, compile_one, skip_precompile=False)
    assert programs.find(1, 1, decode=True)[0] == buckets[1]
    may_go_on.set()
    programs.wait()
    assert programs.find(1, 1, decode=True)[0] == buckets[0]


def test_a_failed_compilation_is_raised_by_the_next_step() -> None:
    buckets = [Bucket(2, 2, 1, 8), Bucket(64, 8, PREFILL_TILE, 8)]

    def compile_one(bucket: Bucket) -> Bucket:
        if bucket == buckets[0]:
            raise RuntimeError("out of memory")
        return bucket

    programs = Programs(buckets, compile_one, skip_precompile=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.wait()
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.find(1, 1, decode=True)


def test_after_a_stop_nothing_further_is_compiled() -> None:
    buckets = [Bucket(2, 2, 1, 8), Bucket(8, 8, 1, 8), Bucket(64, 8, PREFILL_TILE, 8)]
    begun, may_go_on, compiled = threading.Event(), threading.Event(), []

    def compile_one(bucket: Bucket) -> Bucket:
        compiled.append(bucket)
        if bucket == buckets[0]:
            begun.set()
            assert may_go_on.wait(600)
        return bucket

    programs = Programs(buckets, compile_one, skip_precompile=False)
    assert begun.wait(600)
    stopping = threading.Thread(target=programs.stop)
    stopping.start()
    while not programs._stopped:
        stopping.join(0.001)
    assert stopping.is_alive(), "a compilation under way is waited for"
    may_go_on.set()
    stopping.join(600)
    assert compiled == [buckets[2], buckets[0]]
    programs.stop()


def test_without_precompiling_only_what_is_asked_for_is_compiled_and_once() -> None:
    buckets = [Bucket(2, 2, 1, 8), Bucket(8, 8, 1, 8), Bucket(64, 8, PREFILL_TILE, 8)]
    compiled = []

    def compile_one(bucket: Bucket) -> Bucket:
        compiled.append(bucket)
        return bucket

    programs = Programs(reversed(buckets), compile_one, skip_precompile=True)
    assert (len(programs.compile_s_by_bucket), compiled) == (0, [])
    for _ in range(2):
        assert programs.find(3, 3, decode=True) == (buckets[1], buckets[1])
        assert programs.find(3, 3, decode=False) == (buckets[2], buckets[2])
        assert programs.program(buckets[0]) == buckets[0]
    assert compiled == [buckets[1], buckets[2], buckets[0]]
    assert len(programs.compile_s_by_bucket) == 3
    programs.wait()
    programs.stop()


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    code = """
import sys, jax
from app.engine.config import EngineConfig, XlaConfig
from tests.engine.xla.tiny_backends import tiny_backend
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
config = EngineConfig(num_kv_blocks=8, lora_pool_rows=8, max_num_batched_tokens=16, max_num_seqs=2,
                      xla=XlaConfig(compilation_cache_dir=sys.argv[1]))
backend = tiny_backend(config)
backend.programs.wait()
print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    found = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "cache")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        found.append([int(word) for word in process.stdout.split()])
    (first_hits, first_misses), second = found
    assert first_hits == 0
    assert first_misses >= 3  # two or more steps and a writer
    assert second == [first_misses, 0]
