"""Masks for the rows of a step that follow a grammar, made while the step's forward pass runs.

In: the sequences that draw a token in this step. Out: a `TokenMasks`, whose words are there when the logits are. Rule:
a mask is a function of a sequence's grammar and its own tokens; one that fails ends its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import TokenMasks
from app.engine.errors import InvalidRequest

_ALL = np.uint32(0xFFFFFFFF)


class Matcher(Protocol):
    """How far one answer has come in its grammar (`guidance.GrammarMatcher`)."""

    def consume(self, token_ids: list[int]) -> None: ...

    def fill(self, words: NDArray[np.uint32]) -> None: ...

    def copy(self) -> Matcher: ...

    def forced(self) -> list[int]: ...

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

    def ahead(self, output_ids: NDArray[np.int32]) -> Matcher | None:
        """A copy of the matcher that has seen `output_ids` [n], all that the sequence has generated.

        None where the grammar cannot go on, which the next mask finds out. Not while masks are being made.
        """
        matcher = self._matcher.copy()
        try:
            matcher.consume(output_ids[self._num_seen :].tolist())
        except InvalidRequest:
            return None
        return matcher

    def fill(self, output_ids: NDArray[np.int32], drafted_ids: NDArray[np.int32], words: NDArray[np.uint32]) -> None:
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
        if len(drafted_ids):
            self._fill_ahead(drafted_ids.tolist(), words[1:])

    def _fill_ahead(self, drafted_ids: list[int], words: NDArray[np.uint32]) -> None:
        """What may follow each guess, as far as the grammar follows them; words [k, W] is written in place."""
        ahead = self._matcher.copy()
        for index, token_id in enumerate(drafted_ids):
            try:
                ahead.consume([token_id])
                _fill(ahead, words[index])
            except InvalidRequest:  # of a guess; if the answer comes here after all, its own step says why
                words[index:] = _ALL
                return
            self.num_sure += 1


def _fill(matcher: Matcher, words: NDArray[np.uint32]) -> None:
    matcher.fill(words)
    if not words.any():
        raise InvalidRequest("the model has no token for what the grammar asks for here")


class Drawing(Protocol):
    """A sequence that draws a token (`app.engine.sequence.Sequence`)."""

    constraint: Constraint | None
    num_drafted: int

    @property
    def output_ids(self) -> NDArray[np.int32]: ...

    @property
    def drafted_ids(self) -> NDArray[np.int32]: ...


class MaskMaker:
    """Makes masks on a thread of its own, which waits beside the engine's."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._thread = ThreadPoolExecutor(1, "masks")
        self._pending: Future[NDArray[np.uint32]] | None = None

    def start(self, drawing: Sequence[Drawing]) -> TokenMasks | None:
        """Begin with the masks of a step, a row for each sequence and then one for each of its guesses.

        None if none of the sequences has a grammar.
        """
        work = [(s.constraint, s.output_ids, s.drafted_ids) for s in drawing if s.constraint is not None]
        if not work:
            return None
        nums_rows = [1 + sequence.num_drafted for sequence in drawing]
        has_mask = np.repeat([sequence.constraint is not None for sequence in drawing], nums_rows)  # [P]
        of_row = np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)
        self._pending = self._thread.submit(self._fill, work)
        return TokenMasks(of_row, self._pending.result)

    def wait(self) -> None:
        """Until no mask is being made: a forward pass that failed has not asked for its masks."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(self, work: list[tuple[Constraint, NDArray[np.int32], NDArray[np.int32]]]) -> NDArray[np.uint32]:
        words = np.empty((sum(1 + len(drafted_ids) for _, _, drafted_ids in work), self._num_words), np.uint32)
        end = 0
        for constraint, output_ids, drafted_ids in work:
            first, end = end, end + 1 + len(drafted_ids)
            constraint.fill(output_ids, drafted_ids, words[first:end])
        return words
