"""Large arrays on huge pages of memory: a step reads hundreds of megabytes, and a core keeps few addresses of pages.

In: where an array lies. Out: nothing but its speed; its values stay. One rule: only whole pages of the array itself are
asked for. NumPy asks for huge pages for its own arrays, XLA does not.
"""

from __future__ import annotations

import ctypes
import mmap

#: Smaller pieces of memory are left alone.
_LEAST_BYTES = 1 << 22
_HUGE_PAGE = 1 << 21
#: Linux, since 6.1: move what is there now. Not among Python's constants; an older kernel refuses it and moves things
#: by and by.
_MADV_COLLAPSE = 25


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the kernel to hold `num_bytes` bytes at `address` in huge pages (madvise(2)) and to move what is there.

    Advice only: a system that has no huge pages, or no room for them, declines; nothing is raised.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first, end = -(-address // _HUGE_PAGE) * _HUGE_PAGE, (address + num_bytes) // _HUGE_PAGE * _HUGE_PAGE
    if advice is None or num_bytes < _LEAST_BYTES or first >= end:  # None: not Linux
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    madvise(first, end - first, advice)
    madvise(first, end - first, _MADV_COLLAPSE)
