"""The grammar that one sequence's answer follows, and the masks of the tokens that may come next.

A mask is a function of the grammar and the sequence's own tokens. One that cannot be made ends its own sequence alone.
Compiling grammars and computing masks beside the engine's steps is left to `structured`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import InvalidRequest

_ALL = np.uint32(0xFFFFFFFF)


class Matcher(Protocol):
    """How far one answer has come in its grammar (`guidance.GrammarMatcher`)."""

    def consume(self, token_ids: list[int]) -> None: ...

    def fill(self, words: NDArray[np.uint32]) -> None: ...

    def copy(self) -> Matcher: ...

    def forced_token_ids(self) -> list[int]: ...

    def num_allowed(self, token_ids: list[int]) -> int: ...


class Constraint:
    """One sequence's grammar: how many of its tokens the matcher has seen, and why it could not go on.

    `num_sure` rows of the last masks are what the grammar says; those behind follow guesses that it could not follow.
    The matcher itself sees no guess, only copies of it do.
    """

    __slots__ = ("_matcher", "_num_seen", "error", "num_sure")

    def __init__(self, matcher: Matcher, num_seen: int = 0) -> None:
        self._matcher = matcher
        self._num_seen = num_seen
        self.error: InvalidRequest | None = None
        self.num_sure = 0

    def matcher_after(self, output_ids: NDArray[np.int32]) -> Matcher | None:
        """A copy of the matcher that has seen `output_ids` [n], all that the sequence has generated.

        None where the grammar cannot go on, which the next mask finds out. Not while masks are being made.
        """
        matcher = self._matcher.copy()
        try:
            matcher.consume(output_ids[self._num_seen :].tolist())
        except InvalidRequest:
            return None
        return matcher

    def fill(self, output_ids: NDArray[np.int32], draft_ids: NDArray[np.int32], words: NDArray[np.uint32]) -> None:
        """What may follow `output_ids` [n], all that the sequence has generated, and then each of its k guesses.

        words [1 + k, W] is written in place.
        """
        self.num_sure = 1
        try:
            if len(output_ids) > self._num_seen:
                self._matcher.consume(output_ids[self._num_seen :].tolist())
                self._num_seen = len(output_ids)
            _fill(self._matcher, words[0])
        except InvalidRequest as error:
            self.error = error
            words[:] = _ALL  # a row with nothing to draw from is no row; the sequence ends with the error
            return
        if len(draft_ids):
            self._fill_ahead(draft_ids.tolist(), words[1:])

    def _fill_ahead(self, draft_ids: list[int], words: NDArray[np.uint32]) -> None:
        """What may follow each guess, as far as the grammar follows them; words [k, W] is written in place."""
        matcher_after = self._matcher.copy()
        for index, token_id in enumerate(draft_ids):
            try:
                matcher_after.consume([token_id])
                _fill(matcher_after, words[index])
            except InvalidRequest:  # of a guess; if the answer comes here after all, its own step says why
                words[index:] = _ALL
                return
            self.num_sure += 1


def _fill(matcher: Matcher, words: NDArray[np.uint32]) -> None:
    matcher.fill(words)
    if not words.any():
        raise InvalidRequest("the model has no token for what the grammar asks for here")
