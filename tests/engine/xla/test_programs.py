"""The ladder of shapes holds every step; packing loses nothing; a second start reads its programs from disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from app.engine.config import EngineConfig, XlaConfig
from app.engine.xla.programs import Programs, cpu_ladder, ladder
from app.engine.xla.step import PREFILL_TILE, Bucket, _views, pack
from app.kernels.sgmv.xla import SEGMENT_TOKENS, max_segments
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.making import random_adapter, tiny_spec
from tests.engine.xla.making import tiny_backend

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("tokens", "sequences"), [(8, 1), (16, 3), (64, 64), (256, 64), (100, 7)])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_last_bucket_holds_every_step_and_the_smallest_is_chosen(tokens: int, sequences: int, is_cpu: bool) -> None:
    config = EngineConfig(max_batch_tokens=tokens, max_batch_sequences=sequences)
    buckets = cpu_ladder(config, 8) if is_cpu else ladder(config, 8, 1)
    programs = Programs(buckets, lambda bucket: bucket, skip_precompile=False)
    programs.wait()
    assert programs.num_compiled == len(programs.buckets) == len(set(programs.buckets))
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


@pytest.mark.parametrize("form", ["cpu", "xla"])
def test_any_division_of_tokens_fits_its_bucket(form: Literal["cpu", "xla"]) -> None:
    generator = np.random.default_rng()
    config = EngineConfig(num_kv_blocks=64, adapter_rank_rows=128, xla=XlaConfig(form=form, skip_precompile=True))
    adapters = tiny_backend(config)._adapters
    for slot in range(1, 9):
        adapters.assign(slot, slot * 8, random_adapter(tiny_spec(), 5, ["q_proj"]), 8)
    for _ in range(200):
        count = int(generator.integers(1, 9))
        lengths = generator.multinomial(int(generator.integers(0, 64 - count)), np.ones(count) / count) + 1
        pieces = [
            Piece(generator.integers(0, 9, n), int(generator.integers(0, 40)), generator.integers(0, 64, 8), number)
            for number, n in enumerate(lengths)
        ]
        bucket = Bucket(64, 8, PREFILL_TILE, 8, form == "cpu")
        flat = pack(forward_batch(pieces, 16), bucket, 1024, adapters.fill)
        assert len(flat) == bucket.size
        packed = _views(flat, bucket)
        # Every token of an adapter is in one piece of work, no base token is.
        if form == "cpu":
            starts = np.cumsum([0, *lengths])
            assert packed["num_runs"] == count - 1
            expected = [(starts[i], starts[i + 1], i) for i in range(1, count)]
            np.testing.assert_array_equal(packed["runs"][: count - 1], np.reshape(expected, (-1, 3)))
            tasks = packed["shrink_tasks"][: packed["num_shrink_tasks"]]
            assert [t for first, end, _ in tasks for t in range(first, end)] == list(range(lengths[0], starts[-1]))
        else:
            segments = packed["num_segments"]
            assert segments == sum(-(-int(n) // SEGMENT_TOKENS) for n in lengths[1:])
            assert segments <= max_segments(64, 8)


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    code = """
import sys, jax
from app.engine.config import EngineConfig, XlaConfig
from tests.engine.xla.making import tiny_backend
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
config = EngineConfig(num_kv_blocks=8, adapter_rank_rows=8, max_batch_tokens=16, max_batch_sequences=2,
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
