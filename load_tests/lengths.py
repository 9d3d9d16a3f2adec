"""How long prompts and answers are, and the text of a prompt.

In: a spec such as `fixed:64`, `uniform:16:128`, `lognormal:64:0.8`. Out: lengths [count], at least 1. A
prompt of length n is n common English words: about n tokens in most tokenizers. What a server really
counted is in its `usage`, and that is what reports use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    """ValueError for a spec not understood."""
    kind, numbers = split_spec(spec)
    match kind, numbers:
        case "fixed", [n] if n >= 1:
            return np.full(count, int(n))
        case "uniform", [low, high] if 1 <= low <= high:
            return rng.integers(int(low), int(high) + 1, count)
        case "lognormal", [median, sigma, *most] if median >= 1 and sigma >= 0 and len(most) <= 1:
            drawn = np.exp(rng.normal(np.log(median), sigma, count))
            return np.clip(np.rint(drawn), 1, most[0] if most else np.inf).astype(np.int64)
    raise ValueError(f"length distribution {spec!r} is not one of {KINDS}")


def words(count: int, rng: np.random.Generator) -> str:
    """`count` words, drawn independently: no two prompts share a prefix by design."""
    return " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), count))
