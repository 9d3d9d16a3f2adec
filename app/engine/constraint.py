"""A sequence's constraint: the grammar of its answer and the masks of the tokens that may come next.

A mask is a function of the grammar and the sequence's own tokens. If it cannot be computed, only its own sequence ends.
`app.engine.structured_output` compiles grammars and computes masks in parallel to the engine's steps.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import InvalidRequest

_ALL = np.uint32(0xFFFFFFFF)


class Matcher(Protocol):
    """What a constraint needs of `backend_guidance.GrammarMatcher`, which this module may not import (layers)."""

    @property
    def num_words(self) -> int: ...

    def consume(self, token_ids: list[int]) -> None: ...

    def fill(self, words: NDArray[np.uint32]) -> None: ...

    def copy(self) -> Matcher: ...

    def forced_token_ids(self) -> list[int]: ...

    def num_allowed(self, token_ids: list[int]) -> int: ...


class Constraint:
    """The grammar of one sequence: how many of its tokens the matcher has consumed, and the error if it could not go
    on.

    The first `num_sure` rows of the last masks come from the grammar; the rows after them follow draft tokens that it
    does not allow. Draft tokens are consumed by copies of the matcher only.
    """

    __slots__ = ("_matcher", "_num_seen", "error", "num_sure")

    def __init__(self, matcher: Matcher, num_seen: int = 0) -> None:
        self._matcher = matcher
        self._num_seen = num_seen
        self.error: InvalidRequest | None = None
        self.num_sure = 0

    @property
    def num_words(self) -> int:
        """The words of a mask."""
        return self._matcher.num_words

    def matcher_after(self, output_ids: NDArray[np.int32]) -> Matcher | None:
        """A copy of the matcher that has consumed `output_ids` [n], all generated tokens.

        None if the grammar does not allow them; the next mask reports that. Not while masks are being computed.
        """
        matcher = self._matcher.copy()
        try:
            matcher.consume(output_ids[self._num_seen :].tolist())
        except InvalidRequest:
            return None
        return matcher

    def fill(self, output_ids: NDArray[np.int32], draft_ids: NDArray[np.int32], words: NDArray[np.uint32]) -> None:
        """Write the masks after `output_ids` [n], all generated tokens, and after each of the k draft tokens.

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
            words[:] = _ALL  # a row must allow a token; the sequence ends with the error
            return
        if len(draft_ids):
            self._fill_ahead(draft_ids.tolist(), words[1:])

    def _fill_ahead(self, draft_ids: list[int], words: NDArray[np.uint32]) -> None:
        """Write the masks after each draft token, as far as the grammar allows them, into words [k, W]."""
        matcher = self._matcher.copy()
        for index, token_id in enumerate(draft_ids):
            try:
                matcher.consume([token_id])
                _fill(matcher, words[index])
            except InvalidRequest:  # caused by a draft token; if the answer gets here, its own step reports the error
                words[index:] = _ALL
                return
            self.num_sure += 1


def _fill(matcher: Matcher, words: NDArray[np.uint32]) -> None:
    matcher.fill(words)
    if not words.any():
        raise InvalidRequest("the model has no token that the grammar allows here")
