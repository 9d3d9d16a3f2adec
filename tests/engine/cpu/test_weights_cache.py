"""Packed weights in a file: mapped to the bit, and packed again whenever anything that they depend on is another."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from app.engine.adapters.merge import merged_checkpoint
from app.engine.config import Compute, CpuConfig, EngineConfig
from app.engine.cpu import weights_cache
from app.engine.cpu.weights_cache import packed_weights
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cuda.grids import on_grids

DIGEST = "d" * 64


class Part(NamedTuple):
    levels: np.ndarray
    scale: np.float32


class Tree(NamedTuple):
    part: Part
    biases: np.ndarray
    shared: np.ndarray
    count: int


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of the checkpoint `DIGEST`; everything is large enough for the cache."""
    monkeypatch.setenv("POLYLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 0)
    return tmp_path / "weights" / DIGEST[:16]


def packing() -> Callable[[], Tree]:
    """A `pack` that yields other values at each call."""

    def trees() -> Iterator[Tree]:
        for seed in range(100):
            generator = np.random.default_rng(seed)
            levels = generator.integers(0, 256, (3, 70_001), np.uint8)
            yield Tree(Part(levels, np.float32(0.1)), np.zeros(3, np.float32), generator.random(100_000), seed)

    return trees().__next__


def equal(one: Tree, other: Tree) -> bool:
    return (
        one.count == other.count
        and np.array_equal(one.part.levels, other.part.levels)
        and np.array_equal(one.shared, other.shared)
        and one.part.scale == other.part.scale
    )


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_weights_are_packed_once_and_then_mapped_at_pages() -> None:
    pack, first = packing(), packing()()
    for _ in range(3):
        found = packed_weights(DIGEST, ("auto", 64), pack)
        assert equal(found, first)
        assert type(found.part) is Part
        for array in (found.part.levels, found.shared):
            assert array.ctypes.data % 4096 == 0
            assert array.flags.writeable, "Numba compiles other code for arrays that cannot be written"


def test_what_is_written_to_a_mapped_array_changes_no_file(folder: Path) -> None:
    pack = packing()
    mapped = packed_weights(DIGEST, (), pack)
    mapped.part.levels[:] = 0
    assert equal(packed_weights(DIGEST, (), pack), packing()())
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_other_tensors_settings_and_code_are_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packing()
    assert packed_weights(DIGEST, ("auto",), pack).count == 0
    assert packed_weights(DIGEST, ("int8",), pack).count == 1
    assert packed_weights("e" * 64, ("auto",), pack).count == 2
    monkeypatch.setattr(weights_cache, "_code_version", lambda: "other code")
    assert packed_weights(DIGEST, ("auto",), pack).count == 3
    assert packed_weights(DIGEST, ("auto",), pack).count == 3


def test_tensors_without_a_digest_and_small_weights_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = packing()
    assert [packed_weights("", (), pack).count for _ in range(2)] == [0, 1]
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 1 << 30)
    assert [packed_weights(DIGEST, (), pack).count for _ in range(2)] == [2, 3]
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "the structure's size",
        "the number of arrays",
        "a byte of the first page",
        "a byte at the end",
        "cut",
        "empty",
        "header only",
    ],
)
def test_a_damaged_file_is_packed_again(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    pack = packing()
    packed_weights(DIGEST, (), pack)
    path = only_file(folder)
    content = bytearray(path.read_bytes())
    match damage:
        case "the structure's size":
            content[5] ^= 1
        case "the number of arrays":
            content[13] ^= 1
        case "a byte of the first page":
            content[30] ^= 1
        case "a byte at the end":
            content[-1] ^= 128
        case "cut":
            del content[len(content) // 2 :]
        case "empty":
            content.clear()
        case _:
            del content[10:]
    path.unlink()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert packed_weights(DIGEST, (), pack).count == 1
    assert "are packed again" in caplog.text
    assert packed_weights(DIGEST, (), pack).count == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "weights").write_text("a file where the folder would be")
    pack = packing()
    with caplog.at_level(logging.WARNING):
        assert [packed_weights(DIGEST, (), pack).count for _ in range(2)] == [0, 1]
    assert "the packed weights are not cached" in caplog.text


def test_a_full_disk_leaves_no_part_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fsync(handle: int) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert packed_weights(DIGEST, (), packing()).count == 0
    assert list(folder.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_the_last_used_files_of_a_checkpoint_are_kept(folder: Path) -> None:
    pack, now = packing(), time.time()
    for index in range(3):
        packed_weights(DIGEST, index, pack)
        for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)):
            os.utime(path, (now, now - 100 * age - 100))
    assert len([*folder.iterdir()]) == 2
    assert [packed_weights(DIGEST, index, pack).count for index in (2, 1)] == [2, 1]
    (folder / ".packing-killed").touch()
    os.utime(folder / ".packing-killed", (0, 0))
    (folder / ".packing-running").touch()
    packed_weights(DIGEST, 3, pack)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".packing-running"]


def _logits(checkpoint: Checkpoint, compute: Compute) -> np.ndarray:
    config = EngineConfig(
        cpu=CpuConfig(compute=compute, num_threads=1), num_kv_blocks=8, lora_pool_rows=8, max_num_batched_tokens=16,
        max_num_seqs=2,
    )  # fmt: skip
    backend = load_backend(checkpoint, config)
    try:
        backend._warm_up()  # type: ignore[attr-defined]  # one token
        return np.array(backend.logits(1))  # type: ignore[attr-defined]
    finally:
        backend.close()


@pytest.mark.parametrize("compute", ["float32", "int8"])
def test_an_engine_with_mapped_weights_has_the_same_bits(compute: Compute, folder: Path) -> None:
    spec = tiny_spec(3)
    tensors = [(name, on_grids(w, 8) if w.ndim == 2 else w) for name, w in random_tensors(spec, 5)]
    reads = []

    def read() -> Iterator[tuple[str, np.ndarray]]:
        reads.append(1)
        yield from tensors

    known = Checkpoint(spec, Path("unused"), read, tensors_digest=DIGEST)
    plain = _logits(Checkpoint(spec, Path("unused"), read), compute)
    packed, mapped = _logits(known, compute), _logits(known, compute)
    assert len(reads) == 2, "the mapped engine reads no tensor"
    assert only_file(folder).stat().st_size > 10_000
    assert plain.tobytes() == packed.tobytes() == mapped.tobytes()
    assert np.abs(plain).max() > 0


def test_merged_weights_are_not_taken_for_the_bases(folder: Path) -> None:
    spec = tiny_spec()
    base = Checkpoint(spec, Path("unused"), lambda: iter(random_tensors(spec, 5)), tensors_digest=DIGEST)
    expected = _logits(base, "float32")
    merged = merged_checkpoint(base, random_adapter(spec, 4, seed=1))
    assert not np.array_equal(_logits(merged, "float32"), expected)
    assert np.array_equal(_logits(base, "float32"), expected)
    assert len([*folder.iterdir()]) == 1
