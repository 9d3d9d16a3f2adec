"""Random data that is new in every run and can be had again.

In: the run's seed, which pytest prints at its head and beside every failure (`--seed` repeats it), and the name of the
test that runs. Out: a generator. What a test draws depends on nothing else, so it draws the same alone or among others.
"""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np

#: Set by the process that collects for the workers beside it, and by `--seed`.
VARIABLE = "POLYLORA_TEST_SEED"

_drawn: dict[str, int] = {}


def run_seed() -> int:
    """The seed of the whole run; chosen when it is first asked for, and inherited by the processes that tests start."""
    return int(os.environ.setdefault(VARIABLE, str(secrets.randbits(31))))


def rng() -> np.random.Generator:
    """A generator of its own for every call of a test."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("@")[0].rpartition(" (")[0]
    number = _drawn[test] = _drawn.get(test, -1) + 1
    return np.random.default_rng([run_seed(), zlib.crc32(test.encode()), number])


def any_seed() -> int:
    """A seed in 31 bits, for what takes no generator."""
    return int(rng().integers(1 << 31))
