"""Lengths of prompts and answers, and the text of a prompt.

A spec such as `fixed:64`, `uniform:16:128` or `lognormal:64:0.8` gives lengths [count], at least 1. A prompt of length
n is n common English words: about n tokens in most tokenizers. Reports use the server's real counts, its `usage`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.simulation.trace import MOST_TOKENS
from load_tests.arrivals import split_spec

KINDS = "fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX]"

_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find"
)
_WORDS = tuple(_TEXT.split())


def lengths(spec: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[count] from `rng`. ValueError for a spec not understood, a number of words that is not whole among them, and
    for lengths above `MOST_TOKENS`."""
    kind, numbers = split_spec(spec)
    match kind, numbers:
        case "fixed", [n] if n >= 1 and n.is_integer():
            return np.full(count, _at_most(n, spec))
        case "uniform", [low, high] if 1 <= low <= high and low.is_integer() and high.is_integer():
            return rng.integers(int(low), _at_most(high, spec) + 1, count)
        case "lognormal", [median, sigma] | [median, sigma, _] if (
            median >= 1 and sigma >= 0 and all(longest >= 1 and longest.is_integer() for longest in numbers[2:])
        ):
            longest = _at_most(numbers[2], spec) if len(numbers) == 3 else MOST_TOKENS
            with np.errstate(over="ignore"):
                drawn = np.rint(np.exp(rng.normal(np.log(median), sigma, count)))
            if len(numbers) == 2 and drawn.max(initial=1) > longest:
                raise ValueError(f"{spec!r} draws lengths of up to {drawn.max():.3g}; bound it: {spec}:MAX")
            return np.clip(drawn, 1, longest).astype(np.int64)
    raise ValueError(f"length distribution {spec!r} is not one of {KINDS}")


def _at_most(length: float, spec: str) -> int:
    if length > MOST_TOKENS:
        raise ValueError(f"{spec!r}: a length of {length:.7g} is above {MOST_TOKENS}, more than a server takes")
    return int(length)


def words(count: int, rng: np.random.Generator) -> str:
    """`count` words, drawn independently: no two prompts share a prefix by design."""
    return " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), count))
