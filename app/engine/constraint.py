"""A sequence's constraint: the grammar of its answer and the masks of the tokens that may come next.

A mask is a function of the grammar and the sequence's own tokens. If it cannot be computed, only its own sequence ends.
`app.engine.structured_output` compiles grammars, with llguidance, and computes masks in parallel to the engine's steps.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import InvalidRequest

if TYPE_CHECKING:  # llguidance is loaded by the first grammar
    from llguidance import LLMatcher

#: The beginning of a line that quotes the grammar, and the part of a message that is searched for one.
_DRAWING, _MAX_MESSAGE_CHARS = re.compile(r"\s*(?:\d+ *)?\|"), 10_000
_ALL = np.uint32(0xFFFFFFFF)


class Constraint:
    """The grammar of one sequence: how many of its tokens the matcher has consumed, and the error if it could not go
    on.

    The first `num_sure` rows of the last masks come from the grammar; the rows after them follow draft tokens that it
    does not allow. Draft tokens are consumed by copies of the matcher only.
    """

    __slots__ = ("_matcher", "_num_seen", "error", "num_sure")

    def __init__(self, matcher: GrammarMatcher, num_seen: int = 0) -> None:
        self._matcher = matcher
        self._num_seen = num_seen
        self.error: InvalidRequest | None = None
        self.num_sure = 0

    @property
    def num_words(self) -> int:
        """The words of a mask."""
        return self._matcher.num_words

    def matcher_after(self, output_ids: NDArray[np.int32]) -> GrammarMatcher | None:
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


class GrammarMatcher:
    """The position of one answer in its grammar. `num_words`: of a mask. One thread at a time."""

    __slots__ = ("_ends", "_matcher", "num_words")

    def __init__(self, matcher: LLMatcher, num_words: int, ends: EndTokens | None = None) -> None:
        self._matcher, self.num_words = matcher, num_words
        self._ends = ends

    def consume(self, token_ids: list[int]) -> None:
        """Advance by the answer's next tokens. Raises InvalidRequest for one that the grammar does not allow."""
        if not self._matcher.consume_tokens(token_ids):
            raise InvalidRequest(f"the answer left its grammar: {why(self._matcher.get_error())}")

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Write the mask: bit i of words [W], lowest first, is whether token i may come next.

        Where the answer is complete that is only the token that ends it. Raises InvalidRequest for a grammar that
        exceeds a limit here.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar is too complex at this point: {why(self._matcher.get_error())}")
        if self._ends is not None:
            self._ends.correct(words, may_end=self.is_complete())

    def copy(self) -> GrammarMatcher:
        """A copy at the same position, independent of this matcher."""
        return GrammarMatcher(self._matcher.deep_copy(), self.num_words, self._ends)

    def forced_token_ids(self) -> list[int]:
        """The next tokens, as the tokenizer would write them, if the grammar allows only one text.

        This matcher's masks may differ afterwards: call it on a copy.
        """
        return list(self._matcher.compute_ff_tokens())

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of the tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(token_ids))

    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())


class EndTokens(NamedTuple):
    """The tokens that end an answer of a sequence with ends of its own: `own` instead of the vocabulary's."""

    vocabulary: tuple[int, ...]
    own: tuple[int, ...]

    def correct(self, words: NDArray[np.uint32], *, may_end: bool) -> None:
        """Allow the own ends in a mask [W] where the answer may end, and no other end anywhere."""
        for token_id in {*self.vocabulary, *self.own}:
            words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        for token_id in self.own if may_end else ():
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def why(message: str) -> str:
    """llguidance's reason in one line, without the quoted grammar."""
    first, *others = message[:_MAX_MESSAGE_CHARS].split("\n")
    lines = [first, *takewhile(lambda line: not _DRAWING.match(line), others)]
    return " ".join(" ".join(lines).split())[:300]


def _fill(matcher: GrammarMatcher, words: NDArray[np.uint32]) -> None:
    matcher.fill(words)
    if not words.any():
        raise InvalidRequest("the model has no token that the grammar allows here")
