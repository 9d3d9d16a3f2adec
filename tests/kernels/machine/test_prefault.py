"""Pages taken ahead: all of them, the first ones first, and nothing else changes; and pages given back."""

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
    """Private to the process, as arrays are. Not np.zeros: that may be memory of former arrays."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


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


def test_it_lets_go_of_memory_when_stopped() -> None:
    for ahead_bytes in (ALL, PIECE):
        memory = untouched(10 * PIECE)
        held = weakref.ref(memory)
        taker = PagePrefaulter([memory], ahead_bytes)
        taker.stop()
        del memory
        assert held() is None


def test_what_is_not_kept_is_given_back_but_for_what_comes_next() -> None:
    """Pieces 1, 3 and 5 have something to keep, 0 and 2 are used next; and then 4, 6 and so on."""
    parts = [untouched(20 * PIECE), untouched(20 * PIECE), untouched(5 * PIECE - 77)]
    taker = PagePrefaulter(parts, ahead_bytes=2 * PIECE)
    taker.use(18 * PIECE)
    taker.wait()
    for part in parts:
        part[:] = 7
    kept = [(PIECE + 5, PIECE + 6), (4 * PIECE - 1, 4 * PIECE), (5 * PIECE + 9, 6 * PIECE), (20 * PIECE, 20 * PIECE)]
    taker.trim(kept, lambda: False)
    taker.wait()
    pieces = [(index, part[at : at + PIECE]) for part in parts for index, at in enumerate(range(0, len(part), PIECE))]
    for index, piece in pieces:
        expected = 0 if index in (0, 1, 2, 3, 5) else len(piece) // mmap.PAGESIZE
        assert num_absent_pages(piece) == expected, index
    taker.use(3 * PIECE)  # beyond pieces 0 and 2 come the next two
    taker.wait()
    for part in parts[:2]:
        assert num_absent_pages(part[: 7 * PIECE]) == 0
        assert num_absent_pages(part[8 * PIECE :]) == num_pages(part[8 * PIECE :])
    taker.use(20 * PIECE)
    taker.wait()
    assert all(num_absent_pages(part) == 0 for part in parts)
    for index, piece in pieces:
        whole = piece[: len(piece) // mmap.PAGESIZE * mmap.PAGESIZE]
        assert (whole == (7 if index in (0, 1, 2, 3, 5) else 0)).all(), index
    taker.stop()


def test_contents_to_keep_stay_whatever_is_given_back() -> None:
    """Several times in turn, with writes in between, where pages and pieces do not begin with the array."""
    generator = seeds.rng()
    memory = untouched(9 * PIECE)
    part = memory[1234:-4321]
    taker = PagePrefaulter([part], PIECE)
    for _ in range(10):
        end = int(generator.integers(1, len(part)))
        taker.use(end)
        part[:end] = generator.integers(1, 256, end, np.uint8)
        firsts = generator.integers(0, end, int(generator.integers(0, 4))).tolist()
        kept = [(first, min(end, first + int(generator.integers(1, PIECE)))) for first in firsts]
        before = [part[slice(*each)].copy() for each in kept]
        memory[:1234] = memory[-4321:] = 9
        taker.trim(kept, lambda: False)
        assert all(np.array_equal(part[slice(*each)], was) for each, was in zip(kept, before, strict=True))
        assert (memory[:1234] == 9).all()
        assert (memory[-4321:] == 9).all()
    taker.stop()


def test_giving_back_ends_when_there_is_work() -> None:
    memory = untouched(20 * PIECE)
    taker = PagePrefaulter([memory], PIECE)
    taker.use(20 * PIECE)
    taker.wait()
    asked = iter(range(20))
    taker.trim([], lambda: next(asked) == 4)
    assert num_absent_pages(memory) == num_pages(memory[: 4 * PIECE])
    taker.trim([], lambda: False)
    assert num_absent_pages(memory) == num_pages(memory[: 19 * PIECE])
    taker.use(20 * PIECE)
    taker.wait()
    assert num_absent_pages(memory) == 0
    taker.stop()


def test_what_a_system_refuses_to_take_back_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "locked")

    memory = untouched(5 * PIECE)
    taker = PagePrefaulter([memory], PIECE)
    monkeypatch.setattr(prefault, "_drop", refuse)
    taker.trim([], lambda: False)
    taker.stop()
    assert "memory cannot be given back: [Errno 22] locked" in caplog.text


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
    taker = PagePrefaulter([memory.view(np.float32).reshape(3, -1)], 2 * PIECE)
    taker.use(8 * PIECE)
    assert num_absent_pages(memory[: 2 * PIECE]) == 0
    assert num_absent_pages(memory[4 * PIECE :]) == num_pages(memory[4 * PIECE :]), "what is never used is never taken"
    taker.trim([], lambda: False)
    assert num_absent_pages(memory[: 2 * PIECE]) == 0, "nor given back"
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
