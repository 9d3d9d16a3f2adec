"""Prefaulting of large arrays: the system zeroes their pages ahead of use, at once or in the background.

Pages are populated in the order in which they will be used (arrays for the background are written from the front on,
all alike), a little ahead of their use: no step waits for them, and memory that is never used is never taken. This
changes no contents, even while other threads write to the arrays. Pages of no more use can be given back.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

#: The size of a huge page: the lock of the process's memory map is held only as long as zeroing it takes.
_PIECE_BYTES = 1 << 21
#: Linux, since 5.14; not among Python's constants.
_MADV_POPULATE_WRITE = 23

_logger = logging.getLogger(__name__)


class PagePrefaulter:
    """Populates the pages of some arrays ahead of their use, gives them back, and holds the arrays until stopped."""

    def __init__(self, parts: Sequence[NDArray[Any]], ahead_bytes: int) -> None:
        """`parts`: contiguous arrays of zeros, of any shape and size, which are used from the front on, all alike.
        `ahead_bytes` of each are populated beyond what `use` has named. Returns once the first 2 MB of each are
        populated.

        On a system that cannot populate pages (Linux before 5.14, other systems) the first `ahead_bytes` of each are
        written to here, the others are taken at their first use, and none is given back.
        Raises OSError if there is no memory for the first pages; later this is a warning.
        """
        self._parts = parts
        self._places = [_place(part) for part in parts]
        self._num_ahead = -(-ahead_bytes // _PIECE_BYTES)
        self._lock = threading.Lock()
        #: Where pieces begin in each part that are not in use, ascending; they are populated in this order.
        self._offsets: Sequence[int] = range(0, max((size for _, size in self._places), default=0), _PIECE_BYTES)
        self._num_populated = min(len(parts), len(self._offsets) * len(parts))  # each part's pieces by themselves
        self._num_wanted = 0
        self._is_stopped = False
        self._thread: threading.Thread | None = None  # while there is work: an idle one would keep the arrays alive
        if not _populate(map(self._piece, range(self._num_populated))):
            for part in parts:
                part.reshape(-1)[: -(-ahead_bytes // part.itemsize)] = 0
            self._is_stopped = True
        self.use(0)

    def use(self, end: int) -> None:
        """The first `end` bytes of each part are in use: populate what comes next, in the background."""
        num_wanted = (bisect_left(self._offsets, end) + self._num_ahead) * len(self._places)
        if num_wanted > self._num_wanted:
            with self._lock:
                self._num_wanted = num_wanted
                if self._thread is None and self._has_work():
                    self._thread = threading.Thread(target=self._work, name="memory-pages", daemon=True)
                    self._thread.start()

    def trim(self, kept: Iterable[tuple[int, int]], should_stop: Callable[[], bool]) -> None:
        """Give back the pages of each part without a byte in `kept`, ranges (first, end); they read as zeros then.

        The first `ahead_bytes` of these stay, and `use` populates the others again. `should_stop` is asked before each
        2 MB. Nothing else uses the arrays meanwhile.
        """
        if self._is_stopped:
            return
        with self._lock:
            self._num_wanted = 0
        self.wait()
        busy = {piece for first, end in kept for piece in range(first // _PIECE_BYTES, -(-end // _PIECE_BYTES))}
        longest = max((size for _, size in self._places), default=0)
        self._offsets = [at for at in range(0, longest, _PIECE_BYTES) if at // _PIECE_BYTES not in busy]
        self._num_populated = 0
        for index in range(self._num_ahead * len(self._places), len(self._offsets) * len(self._places)):
            if should_stop():
                break
            try:
                _drop(*self._piece(index))
            except OSError as error:
                _logger.warning("memory cannot be given back: %s", error)
                break
        self.use(0)

    def wait(self) -> None:
        """Wait until all pages that are to be populated now are, or the work was stopped."""
        if (thread := self._thread) is not None:
            thread.join()

    def stop(self) -> None:
        """Stop the work; returns after the thread has ended, so that the arrays can be freed."""
        with self._lock:
            self._is_stopped = True
        self.wait()
        self._parts = ()

    def _piece(self, index: int) -> tuple[int, int]:
        """First address and exclusive last address of a piece: the first one of every part, then the next."""
        number, part = divmod(index, len(self._places))
        (address, size), offset = self._places[part], self._offsets[number]
        return address + min(offset, size), address + min(offset + _PIECE_BYTES, size)

    def _has_work(self) -> bool:
        num_wanted = min(self._num_wanted, len(self._offsets) * len(self._places))
        return not self._is_stopped and self._num_populated < num_wanted

    def _work(self) -> None:
        while (piece := self._take_piece()) is not None:
            try:
                _take(*piece)
            except OSError as error:
                _logger.warning("memory cannot be prefaulted; the first tokens that use it may be slow: %s", error)
                self._is_stopped = True

    def _take_piece(self) -> tuple[int, int] | None:
        """The piece to populate; None if there is none for now: then the thread ends."""
        with self._lock:
            if self._has_work():
                self._num_populated += 1
                return self._piece(self._num_populated - 1)
            self._thread = None
        return None


def prefault_pages(array: NDArray[Any]) -> None:
    """Populate all pages of a contiguous array of zeros now.

    On a system that cannot populate pages the array is written to. Raises OSError if there is no memory.
    """
    address, num_bytes = _place(array)
    if not _populate([(address, address + num_bytes)]):
        array[...] = 0


def _place(array: NDArray[Any]) -> tuple[int, int]:
    """(address, bytes) of an array."""
    return array.ctypes.data, array.nbytes


def _populate(pieces: Iterable[tuple[int, int]]) -> bool:
    """Populate the pieces; returns whether this system can. Raises OSError if it has no memory."""
    try:
        for first, end in pieces:
            _take(first, end)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _take(first: int, end: int) -> None:
    """Populate one piece. Raises OSError as madvise(2) does."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _advise(first // mmap.PAGESIZE * mmap.PAGESIZE, end, _MADV_POPULATE_WRITE)


def _drop(first: int, end: int) -> None:
    """Give back the whole pages of one piece; they read as zeros afterwards. Linux only."""
    _advise(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _advise(first: int, end: int, advice: int) -> None:
    """madvise(2), which raises OSError."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if end > first and madvise(first, end - first, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
