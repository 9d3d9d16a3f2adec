"""The memory that processes of this machine may take: its own, and that of the container or unit which they run in.

The kernel ends a process of a control group that exceeds its limit, however much memory the machine has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """The files of a version of control groups."""

    folder: str
    limit: str
    usage: str
    reclaimable: str  # a line of memory.stat: the page cache that is dropped first


_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The lowest limit of this process's control groups; None if they have none below the machine's memory."""
    if not (root / "proc/meminfo").exists():
        return None
    limits = [_number(folder / files.limit) for files, folder in _groups(root)]
    lowest = min((limit for limit in limits if limit is not None), default=None)
    return lowest if lowest is not None and lowest < _meminfo(root, "MemTotal") else None


def hidden_limit_bytes(root: Path = Path("/")) -> int | None:
    """The limit if Ray does not see it, which reads that of the topmost group only, as in a container; or None."""
    limit, tops = memory_limit_bytes(root), (root / files.folder / files.limit for files in (_V1, _V2))
    return None if limit in map(_number, tops) else limit


def available_bytes(root: Path = Path("/")) -> int:
    """What programs may still take on Linux; elsewhere the machine's total."""
    if not (root / "proc/meminfo").exists():
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    available = [_meminfo(root, "MemAvailable")]
    for files, folder in _groups(root):
        limit, used = _number(folder / files.limit), _number(folder / files.usage)
        if limit is not None and used is not None:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            available.append(max(limit - used + int(stat.get(files.reclaimable, 0)), 0))
    return min(available)


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """The folders of this process's control groups of memory and of all above them.

    In a container the path may be the host's, which does not exist here: its limit is then in the topmost folder.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            files = _V1 if "memory" in controllers.split(",") else _V2 if not controllers else None
            if files is not None:
                top = root / files.folder
                folder = top / path.lstrip("/")
                yield from ((files, each) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _number(file: Path) -> int | None:
    """The number in a file; None if there is no file, or it says `max`."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _meminfo(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
