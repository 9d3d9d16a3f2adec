"""Prefaulting of large arrays: the system zeroes their pages ahead of use, at once or in the background.

Pages are populated in the order in which they will be used (arrays for the background are written from the front on,
all alike), a little ahead of their use: no step waits for them, and memory that is never used is never taken. Contents
never change, even while other threads write to the arrays.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from numpy.typing import NDArray

#: The size of a huge page: the lock of the process's memory map is held only as long as zeroing it takes.
_PIECE_BYTES = 1 << 21
#: Linux, since 5.14; not among Python's constants.
_MADV_POPULATE_WRITE = 23

_logger = logging.getLogger(__name__)


class PagePrefaulter:
    """Populates the pages of some arrays ahead of their use, and holds the arrays until it is done or stopped."""

    def __init__(self, parts: Sequence[NDArray[Any]], ahead_bytes: int) -> None:
        """`parts`: contiguous arrays of zeros, of any shape and size, which are used from the front on, all alike.
        `ahead_bytes` of each are populated beyond what `use` has named. Returns once the first 2 MB of each are
        populated.

        On a system that cannot populate pages (Linux before 5.14, other systems) the first `ahead_bytes` of each are
        written to here, and the others are taken at their first use.
        Raises OSError if there is no memory for the first pages; later this is a warning.
        """
        self._parts = parts
        self._ahead_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._end = 0  # of each part, what is to be populated
        self._is_stopped = False
        self._thread: threading.Thread | None = None  # while there is work: an idle one would keep the arrays alive
        self._pieces = _in_order([_place(part) for part in parts])
        if not _populate(islice(self._pieces, len(parts))):
            for part in parts:
                part.reshape(-1)[: -(-ahead_bytes // part.itemsize)] = 0
            self._is_stopped = True
        self._next = next(self._pieces, None)
        self.use(0)

    def use(self, end: int) -> None:
        """The first `end` bytes of each part are in use: populate what comes next, in the background."""
        if end + self._ahead_bytes > self._end:
            with self._lock:
                self._end = end + self._ahead_bytes
                if self._thread is None and self._has_work():
                    self._thread = threading.Thread(target=self._work, name="memory-pages", daemon=True)
                    self._thread.start()

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

    def _has_work(self) -> bool:
        return not self._is_stopped and self._next is not None and self._next[0] < self._end

    def _work(self) -> None:
        while (piece := self._take_piece()) is not None:
            try:
                _take(*piece[1:])
            except OSError as error:
                _logger.warning("memory cannot be prefaulted; the first tokens that use it may be slow: %s", error)
                self._is_stopped = True

    def _take_piece(self) -> tuple[int, int, int] | None:
        """The piece to populate; None if there is none for now: then the thread ends."""
        with self._lock:
            if self._has_work():
                piece, self._next = self._next, next(self._pieces, None)
                return piece
            self._thread = None
        if self._next is None:
            self._parts = ()
        return None


def prefault_pages(array: NDArray[Any]) -> None:
    """Populate all pages of a contiguous array of zeros now.

    On a system that cannot populate pages the array is written to. Raises OSError if there is no memory.
    """
    address, num_bytes = _place(array)
    if not _populate([(0, address, address + num_bytes)]):
        array[...] = 0


def _place(array: NDArray[Any]) -> tuple[int, int]:
    """(address, bytes) of an array."""
    return array.ctypes.data, array.nbytes


def _in_order(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The first 2 MB of every (address, bytes), then the next: offset, first address, exclusive last address."""
    longest = max((num_bytes for _, num_bytes in places), default=0)
    for offset in range(0, longest, _PIECE_BYTES):
        for address, num_bytes in places:
            yield offset, address + min(offset, num_bytes), address + min(offset + _PIECE_BYTES, num_bytes)


def _populate(pieces: Iterable[tuple[int, int, int]]) -> bool:
    """Populate the pieces; returns whether this system can. Raises OSError if it has no memory."""
    try:
        for _, first, end in pieces:
            _take(first, end)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _take(first: int, end: int) -> None:
    """Populate one piece. Raises OSError as madvise(2) does."""
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if end > first and madvise(first, end - first, _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
