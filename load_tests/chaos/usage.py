"""Resources of a service's processes, to find leaks: processes, open files by role and kind, memory.

Compare two counts only under the same load: connections in use are no leak.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.process_tree import processes


class Usage(NamedTuple):
    """Resources of a service's processes, summed. `kinds`: open files by role and kind, `ingress socket`."""

    num_processes: int
    num_files: int
    resident_mb: int
    kinds: Counter[str]

    def to_json(self) -> dict[str, Any]:
        """All counts but the kinds."""
        return {"num_processes": self.num_processes, "num_files": self.num_files, "resident_mb": self.resident_mb}


def usage(*session_ids: int) -> Usage:
    num_processes = resident = 0
    kinds: Counter[str] = Counter()
    for role, pids in processes(*session_ids).items():
        for pid in pids:
            num_processes += 1
            with suppress(FileNotFoundError, ProcessLookupError):
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with suppress(FileNotFoundError):
                        kinds[f"{role} {_kind(os.readlink(entry.path))}"] += 1
    return Usage(num_processes, kinds.total(), resident >> 20, kinds)


def leaks(before: Usage, after: Usage) -> list[str]:
    """Resources that grew more than they may; processes that died were replaced one by one."""
    limits = {
        "num_processes": before.num_processes + 8,
        "num_files": round(1.1 * before.num_files) + 60,
        "resident_mb": round(1.3 * before.resident_mb) + 200,
    }
    more = (after.kinds - before.kinds).most_common(5)
    where = {"num_files": ": " + ", ".join(f"{count} more of {kind}" for kind, count in more)}
    return [
        f"{name} grew from {getattr(before, name)} to {getattr(after, name)}{where.get(name, '')}"
        for name, limit in limits.items()
        if getattr(after, name) > limit
    ]


def _kind(target: str) -> str:
    """A file descriptor's kind, without its number."""
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return f"file *{re.sub(r'.*[0-9_-]', '', Path(target).name)}"
