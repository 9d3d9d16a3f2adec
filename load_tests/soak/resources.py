"""What a service takes over time, by role: memory, descriptors, threads; and rows of its database, temporary files.

A series is flat if the line through it, from `SETTLED_S` on, rises by at most 1 % an hour. Memory moves by whole pages
and arenas, so a line through less than an hour says nothing, and none is judged.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from load_tests.process_tree import processes

#: Caches fill until then.
SETTLED_S = 600.0
#: The shortest time whose slope is judged.
JUDGED_S = 3600.0
MOST_PER_HOUR = 0.01


class Resources:
    """Samples of a service. `folder`: its own, with its database and temporary files."""

    def __init__(self, session_id: int, folder: Path) -> None:
        self._session_id, self._folder = session_id, folder
        self._began_s = time.monotonic()
        self.times_s: list[float] = []
        self.series: dict[str, list[float]] = {}

    def sample(self) -> None:
        """Add one sample of everything."""
        found: dict[str, float] = {}
        for role, pids in processes(self._session_id).items():
            for pid in pids:
                with suppress(FileNotFoundError, ProcessLookupError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    values: dict[str, float] = {
                        "memory kB": _pss_kb(pid),
                        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                        "threads": int(status.partition("Threads:")[2].split()[0]),
                    }
                    for kind, value in values.items():
                        found[f"{role}: {kind}"] = found.get(f"{role}: {kind}", 0) + value
        found["database rows"] = sum(count_rows(path) for path in self._folder.rglob("*.sqlite"))
        found["temporary files"] = sum(path.is_file() for path in self._folder.rglob("staging/**/*"))
        self.times_s.append(time.monotonic() - self._began_s)
        for name in found.keys() | self.series.keys():
            self.series.setdefault(name, [0.0] * (len(self.times_s) - 1)).append(found.get(name, 0.0))

    def slopes(self) -> Mapping[str, float]:
        """By series, its change per hour as a fraction of its mean, from `SETTLED_S` on or over all that there is."""
        times_s = np.array(self.times_s)
        settled = times_s >= (SETTLED_S if times_s[-1] > 2 * SETTLED_S else 0)
        return {
            name: slope_per_hour(times_s[settled], np.array(values)[settled]) for name, values in self.series.items()
        }

    def tenths(self) -> Mapping[str, list[float]]:
        """By series, its median in each tenth of the time: shows whether a rise ends."""
        return {
            name: [float(np.median(part)) for part in np.array_split(values, 10) if len(part)]
            for name, values in self.series.items()
        }

    def wrongs(self) -> list[str]:
        """The series that rise too fast; empty after less than `JUDGED_S`."""
        if self.times_s[-1] - SETTLED_S < JUDGED_S:
            return []
        return [
            f"{name} rose by {slope:.1%} an hour"
            for name, slope in self.slopes().items()
            if slope > MOST_PER_HOUR and name != "database rows"  # usage by the hour is kept
        ]


def slope_per_hour(times_s: np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """Change per hour of the line through the values, as a fraction of their mean; 0 for fewer than two."""
    values = np.asarray(values, np.float64)
    if len(values) < 2 or not values.mean():
        return 0.0
    slope, _ = np.polyfit(times_s, values, 1)
    return float(slope * 3600 / values.mean())


def count_rows(path: Path) -> int:
    """Rows of all tables of a SQLite database."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30) as connection:
        tables = connection.execute("select name from sqlite_master where type = 'table'").fetchall()
        return sum(connection.execute(f'select count(*) from "{name}"').fetchone()[0] for (name,) in tables)


def _pss_kb(pid: int) -> int:
    """Memory of a process; what it shares is divided among those that share it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0])
