"""How much memory this process holds.

In: what the system says. Out: bytes. Rule: it is the process's own resident memory; what it shares (adapters in Ray's
object store) counts as far as it is mapped.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Now, on Linux; elsewhere the most that it was."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
