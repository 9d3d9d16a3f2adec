"""Pages taken ahead: all of them, the first ones first, and nothing else changes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref

import numpy as np
import pytest

from app.kernels.machine import prefault
from app.kernels.machine.prefault import PagePrefaulter, prefault_pages
from tests import seeds

PIECE = 1 << 21
#: As far ahead as arrays are.
ALL = 1 << 40


def num_absent_pages(array: np.ndarray) -> int:
    """Whole pages of an array that the system has not given yet (mincore(2))."""
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (array.ctypes.data + array.nbytes - first) // mmap.PAGESIZE
    states = np.zeros(num_pages, np.uint8)
    address, size = ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(states.ctypes.data)) == 0
    return int((states & 1 == 0).sum())


def num_pages(array: np.ndarray) -> int:
    return len(array) // mmap.PAGESIZE


def untouched(num_bytes: int) -> np.ndarray:
    """Not np.zeros: that may be memory of former arrays."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def test_all_pages_come_and_the_front_of_every_part_at_once() -> None:
    parts = [untouched(size) for size in (20 * PIECE, 7 * PIECE + 12345, 1, 3 * PIECE)]
    assert num_absent_pages(parts[0]) > 0
    taker = PagePrefaulter(parts, ALL)
    for part in parts:
        assert num_absent_pages(part[:PIECE]) == 0
    taker.wait()
    for part in parts:
        assert num_absent_pages(part) == 0
        assert not part.any()


def test_pages_come_as_the_arrays_are_used_and_ahead_of_that() -> None:
    parts = [untouched(size) for size in (20 * PIECE, 20 * PIECE, 3 * PIECE)]
    taker = PagePrefaulter(parts, ahead_bytes=2 * PIECE)
    for used, end in ((0, 2), (PIECE, 3), (2 * PIECE + 1, 5), (2 * PIECE + 2, 5), (PIECE, 5), (18 * PIECE + 1, 20)):
        taker.use(used)
        taker.wait()
        for part in parts:
            assert num_absent_pages(part[: end * PIECE]) == 0
            assert num_absent_pages(part[(end + 1) * PIECE :]) == len(part[(end + 1) * PIECE :]) // mmap.PAGESIZE
    taker.stop()


@pytest.mark.parametrize("parts", [[], [np.zeros((3, 0, 8))]])
def test_nothing_takes_no_pages(parts: list[np.ndarray]) -> None:
    PagePrefaulter(parts, ALL).wait()


def test_what_is_written_meanwhile_stays() -> None:
    memory = untouched(40 * PIECE)
    rng = seeds.rng()
    places = rng.permutation(len(memory))[:20_000]
    values = rng.integers(1, 256, len(places), np.uint8)
    taker = PagePrefaulter([memory[: 20 * PIECE], memory[20 * PIECE :]], ALL)
    memory[places] = values
    taker.wait()
    assert np.array_equal(memory[places], values)
    memory[places] = 0
    assert not memory.any()


def test_it_lets_go_of_memory_when_stopped_and_when_done() -> None:
    for end, ahead_bytes in ((PagePrefaulter.stop, ALL), (PagePrefaulter.wait, ALL), (PagePrefaulter.stop, PIECE)):
        memory = untouched(10 * PIECE)
        held = weakref.ref(memory)
        taker = PagePrefaulter([memory], ahead_bytes)
        end(taker)
        del memory
        assert held() is None


def test_what_waits_for_use_keeps_no_memory_alive() -> None:
    memory = untouched(10 * PIECE)
    held = weakref.ref(memory)
    taker = PagePrefaulter([memory], PIECE)
    taker.wait()
    del memory, taker
    assert held() is None


def test_all_pages_come_now() -> None:
    memory = untouched(5 * PIECE)
    part = memory[3 * mmap.PAGESIZE // 2 : -mmap.PAGESIZE // 2]
    memory[0] = part[7] = 9
    prefault_pages(part)
    assert num_absent_pages(memory) == 0
    assert memory.sum() == 18
    prefault_pages(part[:0])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_system_that_takes_none_ahead_has_them_written_to(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(prefault, "_take", refuse)
    memory = untouched(5 * PIECE)
    PagePrefaulter([memory[:PIECE], memory[PIECE:]], ALL)
    assert num_absent_pages(memory) == 0
    memory = untouched(9 * PIECE)
    PagePrefaulter([memory.view(np.float32).reshape(3, -1)], 2 * PIECE).use(8 * PIECE)
    assert num_absent_pages(memory[: 2 * PIECE]) == 0
    assert num_absent_pages(memory[4 * PIECE :]) == num_pages(memory[4 * PIECE :]), "what is never used is never taken"
    memory = untouched(5 * PIECE)
    prefault_pages(memory)
    assert num_absent_pages(memory) == 0


def test_no_memory_is_an_error_at_start_and_a_warning_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(first: int, _: int) -> None:
        if first != memory.ctypes.data:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(prefault, "_take", refuse)
    memory = untouched(5 * PIECE)
    PagePrefaulter([memory], ALL).wait()
    assert "Cannot allocate memory" in caplog.text
    with pytest.raises(OSError, match="Cannot allocate memory"):
        PagePrefaulter([memory, memory[PIECE:]], ALL)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        prefault_pages(memory[PIECE:])
