"""How long guesses are, and when none is made."""

from __future__ import annotations

from app.engine.sequence import FIRST_DRAFT_LENGTH, MAX_DRAFT_LENGTH, MAX_PAUSE, DraftLength


def rests(pace: DraftLength) -> int:
    """Steps until the next guess."""
    count = 0
    while not pace.length():
        count += 1
    return count


def test_guesses_grow_while_they_are_right_and_shrink_to_what_was_right() -> None:
    pace = DraftLength()
    assert pace.length() == FIRST_DRAFT_LENGTH
    pace.observe(FIRST_DRAFT_LENGTH, FIRST_DRAFT_LENGTH)
    assert pace.length() == MAX_DRAFT_LENGTH
    pace.observe(MAX_DRAFT_LENGTH, 2)
    assert pace.length() == 3


def test_each_wrong_guess_doubles_the_time_without_one_until_one_is_right() -> None:
    pace, waited = DraftLength(), []
    for _ in range(9):
        pace.observe(1, 0)
        waited.append(rests(pace))
    assert waited == [2, 4, 8, 16, 32, 64, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    pace.observe(1, 1)
    assert rests(pace) == 0
    pace.observe(1, 0)
    assert rests(pace) == 2
