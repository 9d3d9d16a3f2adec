"""What of a step's time is the base's, and what the adapters'.

In: steps, each with its tokens, its adapters' rank rows and how long it took. Out: seconds of the base and of the
deltas, which add up to those of the steps. A step is one call, in which base products and deltas take turns thread by
thread, so no clock tells them apart: the deltas' part is that of the line through a sample of the late steps. Rule: it
costs a few additions a step; as long as steps do not differ in their adapters, no line can tell, and all is the base's.
"""

from __future__ import annotations

import numpy as np

#: One step of so many is part of the sample, and the line is fitted anew after so many of those.
SAMPLE_EVERY, FIT_EVERY = 4, 16
#: Those of so many sampled steps before count half.
HALF_LIFE = 128
#: Of a step: itself, its tokens, rank rows that are read, and tokens times rows of their adapter.
NUM_FEATURES = 4


class StepSplit:
    """Written by the engine's thread only."""

    def __init__(self) -> None:
        self.base_s = self.deltas_s = 0.0
        self._products = np.zeros((NUM_FEATURES, NUM_FEATURES))  # of features with each other, fading
        self._targets = np.zeros(NUM_FEATURES)  # of features with the time
        self._num_steps = 0
        self._row_s = self._token_row_s = 0.0

    def observe(self, num_tokens: int, num_rows: int, num_token_rows: int, time_s: float) -> None:
        """A step. num_rows: rank rows of its adapters, each counted once; num_token_rows: the same for every token."""
        self._num_steps += 1
        if self._num_steps % SAMPLE_EVERY == 0:
            self._take((1.0, num_tokens, num_rows, num_token_rows), time_s)
        deltas_s = min(num_rows * self._row_s + num_token_rows * self._token_row_s, time_s)
        self.deltas_s += deltas_s
        self.base_s += time_s - deltas_s

    def _take(self, values: tuple[float, ...], time_s: float) -> None:
        fade, features = 0.5 ** (1 / HALF_LIFE), np.array(values)
        self._products = fade * self._products + np.outer(features, features)
        self._targets = fade * self._targets + time_s * features
        if self._num_steps % (SAMPLE_EVERY * FIT_EVERY) == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares without negative times: what the others explain, or what comes out below 0, is left out."""
        scale = np.sqrt(np.maximum(np.diag(self._products), 1e-30))
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        kept, found = [*range(NUM_FEATURES)], np.zeros(NUM_FEATURES)
        while kept:
            part, _, rank, _ = np.linalg.lstsq(products[np.ix_(kept, kept)], targets[kept], rcond=1e-6)
            if rank < len(kept):
                kept.pop()  # the adapters' first: what could be the base's is the base's
            elif (part < 0).any():
                kept.pop(int(np.argmin(part)))
            else:
                found[kept] = part / scale[kept]
                break
        self._row_s, self._token_row_s = float(found[2]), float(found[3])
