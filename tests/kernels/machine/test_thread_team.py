"""Phases shared by threads: every piece is done exactly once, in order of phases, whoever comes late or never."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import TAIL, ThreadTeam, claim_piece, count_pieces, finish_phase, piece
from tests import seeds


@jit
def _add_up(team, phase, table, num_phases, size):  # type: ignore[no-untyped-def]
    """table[p + 1] = 1 + the sum of table[p]: right only if no piece of a phase starts before the last one is done."""
    for row in range(num_phases):
        num_items, done = table.shape[1], 0
        num_pieces = count_pieces(num_items, size)
        index = claim_piece(team, phase)
        while index < num_pieces:
            first, end = piece(index, num_items, size)
            for i in range(first, end):
                total = 0
                for j in range(num_items):
                    total += table[row, j]
                table[row + 1, i] += total % 1000003 + 1
            done += 1
            index = claim_piece(team, phase)
        phase = finish_phase(team, phase, num_pieces, done)
    return phase


def _expected(first: list[int], num_phases: int) -> list[list[int]]:
    rows = [first]
    for _ in range(num_phases):
        rows.append([sum(rows[-1]) % 1000003 + 1] * len(first))
    return rows


@pytest.mark.parametrize("num_threads", [1, 2, 3, 9])
def test_every_piece_is_done_once_and_phases_follow_each_other(num_threads: int) -> None:
    rng, team = seeds.rng(), ThreadTeam(num_threads)
    for _ in range(60):
        num_items, size = int(rng.integers(1, 60)), int(rng.integers(1, 9))
        table = np.zeros((41, num_items), np.int64)
        table[0] = rng.integers(0, 1000, num_items)
        team.run(_add_up, 40, table, 40, size)
        assert table.tolist() == _expected(table[0].tolist(), 40)
    team.close()


def test_a_helper_that_comes_when_all_is_done_changes_nothing() -> None:
    table = np.zeros((6, 11), np.int64)
    counters = np.zeros((5, 16), np.int64)
    _add_up(counters, 0, table, 5, 2)
    done = table.copy()
    for _ in range(3):
        assert _add_up(counters, 0, table, 5, 2) == 5
    assert np.array_equal(table, done)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_pieces_cover_all_items_once_and_end_small(size: int) -> None:
    for num_items in [0, 1, TAIL, TAIL + 1, 37, 192, 3072]:
        pieces = [piece(index, num_items, size) for index in range(count_pieces(num_items, size))]
        assert [i for first, end in pieces for i in range(first, end)] == list(range(num_items))
        sizes = [end - first for first, end in pieces]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes, default=0) <= size
        assert sizes[-4:] == [1] * min(4, num_items)


def test_threads_end_with_their_team() -> None:
    before = {*threading.enumerate()}
    team = ThreadTeam(4)
    threads = {*threading.enumerate()} - before
    assert len(threads) == 3
    team.close()
    assert not threads & {*threading.enumerate()}
    with pytest.raises(RuntimeError, match="has ended"):
        team.run(_add_up, 1, np.zeros((2, 3), np.int64), 1, 1)
    with pytest.raises(ValueError, match="0 threads"):
        ThreadTeam(0)
