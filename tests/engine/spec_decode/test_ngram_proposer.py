"""Guesses from the text so far and from predictions."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.spec_decode.ngram_proposer import num_predicted_tokens, propose_ngram, propose_predicted


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("known", "draft"),
    [
        ((), []),
        ((1,), []),
        ((1, 2), []),
        ((1, 2, 9, 1, 2), []),  # two tokens in common say nothing
        ((0, 1, 2, 3, 4, 0, 1, 2), [3, 4, 0]),
        ((0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2), [4, 0, 1]),  # of equal ones the last
        ((8, 0, 1, 2, 3, 9, 0, 1, 2, 4, 8, 0, 1, 2), [3, 9, 0]),  # but the longest before that
        ((5, 5, 5, 5), [5, 5, 5]),  # what repeats goes on
        ((6, 7, 6, 7, 6, 7), [6, 7, 6]),
    ],
)
def test_what_followed_the_same_tokens_before_may_follow_again(known: tuple[int, ...], draft: list[int]) -> None:
    assert propose_ngram(ids(*known), 3).tolist() == draft
    assert len(propose_ngram(ids(*known), 0)) == 0


@pytest.mark.parametrize(
    ("output", "draft"),
    [
        ((), [1, 2, 3]),
        ((1,), [2, 3, 4]),
        ((9,), []),
        ((2,), []),  # an answer of one token is at the beginning or nowhere
        ((1, 2), [3, 4, 1]),
        ((9, 3, 4), [1, 2, 5]),  # after a difference, where two tokens agree again
        ((3, 4, 1, 2), [5]),
        ((1, 9), []),
        ((2, 5), []),  # the end of the prediction
    ],
)
def test_a_prediction_goes_on_where_the_answer_agrees_with_it(output: tuple[int, ...], draft: list[int]) -> None:
    assert propose_predicted(ids(*output), ids(1, 2, 3, 4, 1, 2, 5), 3).tolist() == draft


@pytest.mark.parametrize(
    ("output", "prediction", "count"),
    [
        ([], [], 0),
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([9, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2),  # 2 and 3 show where to go on
        ([1, 2, 9, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6], 3),
        ([1, 2, 1, 2, 1, 2], [1, 2], 2),  # no more than there are
    ],
)
def test_tokens_that_a_prediction_foretold_are_counted(output: list[int], prediction: list[int], count: int) -> None:
    assert num_predicted_tokens(output, prediction) == count
