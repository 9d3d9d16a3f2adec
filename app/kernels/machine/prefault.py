"""Pages of memory for large arrays, taken from the system ahead, at once or in the background.

In: arrays, or parts of them; those for the background will be written from the front on, all alike. Out: nothing but a
time: the system zeroes their pages now, in the order in which they will be used, not when a step first comes to them.
One rule: contents stay as they are, whoever writes to the arrays meanwhile.
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

#: As much as a huge page: the lock of the process's memory map is held for no longer than it takes to zero it.
_PIECE_BYTES = 1 << 21
#: Linux, since 5.14. Not among Python's constants.
_MADV_POPULATE_WRITE = 23

_logger = logging.getLogger(__name__)


class PagePrefaulter:
    """Takes the pages of some arrays, and keeps these until it is done or stopped."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        """`parts`: contiguous, of any shape and size, zeros so far. Returns when the first 2 MB of each are there.

        A system that cannot take pages ahead (Linux before 5.14, others than Linux) has them all written to here.
        Raises OSError when there is no memory for these first ones; later on that is a warning.
        """
        self._parts = parts
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._take_all, name="memory-pages", daemon=True)
        self._pieces = _in_order([_place(part) for part in parts])
        if not _populate(islice(self._pieces, len(parts))):
            for part in parts:
                part[...] = 0
            self._stopped.set()
        self._thread.start()

    def wait(self) -> None:
        """Until all pages are there, or it was stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Returns when the thread has ended: the arrays' memory can be freed."""
        self._stopped.set()
        self._thread.join()

    def _take_all(self) -> None:
        try:
            for first, end in self._pieces:
                if self._stopped.is_set():
                    break
                _take(first, end)
        except OSError as error:
            _logger.warning("memory is not taken ahead, and the first tokens in it may stall: %s", error)
        self._parts = ()


def prefault_pages(array: NDArray[Any]) -> None:
    """All pages of a contiguous array of zeros, here and now.

    A system that cannot take pages ahead has it written to. Raises OSError when there is no memory.
    """
    address, num_bytes = _place(array)
    if not _populate([(address, address + num_bytes)]):
        array[...] = 0


def _place(array: NDArray[Any]) -> tuple[int, int]:
    """Address, bytes."""
    return array.ctypes.data, array.nbytes


def _in_order(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The first 2 MB of every place (address, bytes), then the next: addresses, the second exclusive."""
    longest = max((num_bytes for _, num_bytes in places), default=0)
    for offset in range(0, longest, _PIECE_BYTES):
        for address, num_bytes in places:
            yield address + min(offset, num_bytes), address + min(offset + _PIECE_BYTES, num_bytes)


def _populate(pieces: Iterable[tuple[int, int]]) -> bool:
    """Whether this system takes pages ahead. Raises OSError when it does, but has none."""
    try:
        for first, end in pieces:
            _take(first, end)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _take(first: int, end: int) -> None:
    """Raises OSError as madvise(2) does."""
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if end > first and madvise(first, end - first, _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
