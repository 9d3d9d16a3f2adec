"""Measurements that survive a noisy machine: interleaved rounds, and medians of ratios within a round.

Two values of one round were taken minutes or less apart on the same machine, so their ratio is meaningful even when
neither value is. Every second round runs backwards, so that a drift favours no system. Also here: the machine and
versions of a run, and lists of numbers on the command line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from load_tests.avx2 import is_limited

KeyT = TypeVar("KeyT", bound=Hashable)


class Spread(NamedTuple):
    """Median, smallest and largest of a few values."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to take a median of; run at least one round")
    return Spread(statistics.median(values), min(values), max(values))


def rounds(measurements: Mapping[KeyT, Callable[[], float]], num_rounds: int) -> dict[KeyT, list[float]]:
    """Take every measurement once per round, forwards and backwards in turn; values in order of rounds."""
    values: dict[KeyT, list[float]] = {key: [] for key in measurements}
    for number in range(num_rounds):
        for key in list(measurements)[:: 1 if number % 2 == 0 else -1]:
            values[key].append(measurements[key]())
    return values


def ratios(values: Sequence[float], reference: Sequence[float]) -> Spread:
    """The spread of value / reference, round by round."""
    return spread([value / base for value, base in zip(values, reference, strict=True)])


def environment() -> dict[str, object]:
    """The machine, the versions and the commit a run saw; load averages at this moment."""
    return {
        "cpu": _cpu_name() + (" limited to AVX2" if is_limited() else ""),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "numba", "numpy", "transformers", "peft")
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    """The commit of the working tree, with a plus where it was changed; "unknown" outside of git."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def numbers(text: str) -> tuple[int, ...]:
    """'1,8,32' -> (1, 8, 32); an empty text is none. Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,8,32") from error
    if any(number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} must hold integers of at least 1")
    return found
