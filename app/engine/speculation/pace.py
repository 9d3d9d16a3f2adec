"""How many tokens a sequence's next guess has, from what became of its last ones.

In: how many were guessed and how many were right. Out: a length, 0 for no guess. Rule: guesses grow while they are
right, shrink to what was right of them, and after one that was all wrong none is made for a while, which doubles.
"""

from __future__ import annotations

#: Of a sequence's first guess, and of any.
FIRST_LENGTH, MAX_LENGTH = 3, 7
#: The longest time without a guess, in steps.
MAX_REST = 128


class Pace:
    """One sequence's, for one kind of guess."""

    __slots__ = ("_length", "_num_wrong", "_rest")

    def __init__(self) -> None:
        self._length = FIRST_LENGTH
        self._num_wrong = self._rest = 0

    def length(self) -> int:
        """For the present step; called once in each."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._length

    def told(self, num_guessed: int, num_right: int) -> None:
        """What became of a guess of at least one token."""
        if not num_right:
            self._num_wrong += 1
            self._rest = min(1 << self._num_wrong, MAX_REST)
            self._length = 1
            return
        self._num_wrong = 0
        self._length = min(2 * num_guessed + 1, MAX_LENGTH) if num_right == num_guessed else num_right + 1
