"""Draft tokens by n-gram lookup: what followed the last tokens earlier in the same text, or in a predicted one.

A draft is a function of token ids alone. Prompt lookup is Saxena's
(https://github.com/apoorvumang/prompt-lookup-decoding, 2023); OpenAI calls the other kind predicted outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

#: The fewest last tokens that must occur earlier, and the most that are compared to choose the best place. In the
#: sequence's own text two are too few: every value of a JSON object begins with the same two.
MIN_MATCH, MIN_MATCH_PREDICTED, MAX_MATCH = 3, 2, 8

NOTHING: Ids = np.empty(0, np.int32)
NOTHING.flags.writeable = False


def propose_ngram(known: Ids, max_tokens: int) -> Ids:
    """Up to `max_tokens` ids that followed where the longest suffix of `known` [n] last occurred in it.

    Where these reach the end of `known`, they are repeated.
    """
    place = _best_place(known, known, MIN_MATCH)
    if place is None or max_tokens <= 0:
        return NOTHING
    return np.resize(known[place + 1 :], max_tokens)


def propose_predicted(output: Ids, prediction: Ids, max_tokens: int) -> Ids:
    """Up to `max_tokens` ids that follow in `prediction` [m] where it agrees with the end of `output` [n].

    An output that equals the beginning of the prediction continues with it, however short.
    """
    place: int | None = len(output) - 1
    if not np.array_equal(prediction[: len(output)], output):
        place = _best_place(output, prediction, MIN_MATCH_PREDICTED)
    return NOTHING if place is None else prediction[place + 1 : place + 1 + max_tokens]


def num_predicted_tokens(output: Sequence[int], prediction: Sequence[int]) -> int:
    """How many tokens of an output were predicted: those that follow in the prediction after the same two tokens.

    Counted from ids alone, so independent of what was verified together.
    """
    place_after = {pair: place + 2 for place, pair in enumerate(itertools.pairwise(prediction))}
    count, place = 0, 0
    for index, token_id in enumerate(output):
        if place < len(prediction) and prediction[place] == token_id:
            count, place = count + 1, place + 1
        else:
            place = place_after.get((output[index - 1], token_id), len(prediction)) if index else len(prediction)
    return min(count, len(prediction))


def _best_place(known: Ids, source: Ids, min_match: int) -> int | None:
    """The last index of `source`, except its end, with the longest common suffix with `known`."""
    if len(known) < min_match:
        return None
    places = np.flatnonzero(source[:-1] == known[-1])
    for back in range(1, min(MAX_MATCH, len(known))):
        places_before = places[places >= back]
        longer = places_before[source[places_before - back] == known[-1 - back]]
        if not len(longer):
            return int(places[-1]) if back >= min_match and len(places) else None
        places = longer
    return int(places[-1])
