"""How long drafts are, and when none is made."""

from __future__ import annotations

from app.engine.sequence import FIRST_DRAFT_LENGTH, MAX_DRAFT_LENGTH, MAX_PAUSE, DraftLength


def pause(draft_length: DraftLength) -> int:
    """Steps until the next draft."""
    count = 0
    while not draft_length.length():
        count += 1
    return count


def test_drafts_grow_while_accepted_and_shrink_to_the_accepted_part() -> None:
    draft_length = DraftLength()
    assert draft_length.length() == FIRST_DRAFT_LENGTH
    draft_length.observe(FIRST_DRAFT_LENGTH, FIRST_DRAFT_LENGTH)
    assert draft_length.length() == MAX_DRAFT_LENGTH
    draft_length.observe(MAX_DRAFT_LENGTH, 2)
    assert draft_length.length() == 3


def test_each_rejected_draft_doubles_the_pause_until_one_is_accepted() -> None:
    draft_length, waited = DraftLength(), []
    for _ in range(9):
        draft_length.observe(1, 0)
        waited.append(pause(draft_length))
    assert waited == [2, 4, 8, 16, 32, 64, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    draft_length.observe(1, 1)
    assert pause(draft_length) == 0
    draft_length.observe(1, 0)
    assert pause(draft_length) == 2
