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
    """How far one answer has come in its grammar (`guidance.Matcher`)."""

    def consume(self, token_ids: list[int]) -> None: ...

    def fill(self, words: NDArray[np.uint32]) -> None: ...


class Constraint:
    """One sequence's grammar: how many of its tokens the matcher has seen, and why it could not go on."""

    __slots__ = ("_matcher", "_num_seen", "error")

    def __init__(self, matcher: Matcher, num_seen: int = 0) -> None:
        self._matcher = matcher
        self._num_seen = num_seen
        self.error: InvalidRequest | None = None

    def fill(self, output_ids: NDArray[np.int32], words: NDArray[np.uint32]) -> None:
        """What may follow `output_ids` [n], all that the sequence has generated; words [W] written in place."""
        try:
            if len(output_ids) > self._num_seen:
                self._matcher.consume(output_ids[self._num_seen :].tolist())
                self._num_seen = len(output_ids)
            self._matcher.fill(words)
            if not words.any():
                raise InvalidRequest("the model has no token for what the grammar asks for here")
        except InvalidRequest as error:
            self.error = error
            words[:] = _ALL  # a row with nothing to draw from is no row; the sequence ends with the error


class Drawing(Protocol):
    """A sequence that draws a token (`app.engine.sequence.Sequence`)."""

    constraint: Constraint | None

    @property
    def output_ids(self) -> NDArray[np.int32]: ...


class MaskMaker:
    """Makes masks on a thread of its own, which waits beside the engine's."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._thread = ThreadPoolExecutor(1, "masks")
        self._pending: Future[NDArray[np.uint32]] | None = None

    def start(self, sampled: Sequence[Drawing]) -> TokenMasks | None:
        """Begin with the masks of a step; None if none of its sequences has a grammar."""
        followed = [(sequence, sequence.constraint) for sequence in sampled if sequence.constraint is not None]
        if not followed:
            return None
        of_row = np.full(len(sampled), -1, np.int32)
        of_row[[p for p, sequence in enumerate(sampled) if sequence.constraint is not None]] = np.arange(len(followed))
        work = [(constraint, sequence.output_ids) for sequence, constraint in followed]
        self._pending = self._thread.submit(self._fill, work)
        return TokenMasks(of_row, self._pending.result)

    def wait(self) -> None:
        """Until no mask is being made: a forward pass that failed has not asked for its masks."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(self, work: list[tuple[Constraint, NDArray[np.int32]]]) -> NDArray[np.uint32]:
        words = np.empty((len(work), self._num_words), np.uint32)
        for index, (constraint, output_ids) in enumerate(work):
            constraint.fill(output_ids, words[index])
        return words
