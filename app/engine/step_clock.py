"""How long the present step has lasted, and how long steps usually last.

In: the beginning and the end of every step, from the thread that makes them; looks, at intervals, from another. Out:
the age of the step that is being computed. Rule: the age is the time between looks that saw the same step, so a process
that was stopped, or whose machine slept, does not look like a step that hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

#: So many steps say what is usual.
NUM_STEPS = 64
#: More time than this between two looks is time in which this process did not run; looks are a second apart.
LONGEST_GAP_S = 2.0


class StepClock:
    """`clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_begun = 0
        self._present: int | None = None
        self._began_s = 0.0
        self._lasted_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._seen: int | None = None
        self._looked_s = 0.0
        self._age_s = 0.0

    # -- the thread that steps ------------------------------------------------------------------------

    def begin(self) -> None:
        self._num_begun += 1
        self._began_s = self._clock()
        self._present = self._num_begun

    def end(self) -> None:
        self._present = None
        self._lasted_s.append(self._clock() - self._began_s)

    # -- whoever looks, one thread --------------------------------------------------------------------

    @property
    def usual_s(self) -> float:
        """The median of the last steps; 0 before the first has ended."""
        return median(list(self._lasted_s)) if self._lasted_s else 0.0

    def age_s(self) -> float:
        """How long the present step has been seen; 0 at the first look at it, or when there is none."""
        now_s, present = self._clock(), self._present
        if present is None or present != self._seen:
            self._age_s = 0.0
        else:
            self._age_s += min(now_s - self._looked_s, LONGEST_GAP_S)
        self._seen, self._looked_s = present, now_s
        return self._age_s
