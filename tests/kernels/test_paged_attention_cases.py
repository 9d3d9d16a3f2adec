"""Attention in every form on the same corner cases, into memory full of NaN, against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.paged_attention import cpu, reference, triton
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.tensors import DEVICE
from tests.kernels.torch_forms import paged_attention as plain
from tests.seeds import rng

Floats = NDArray[np.float32]
HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 6, 2, 16, 16, 10


class Batch(NamedTuple):
    """q: [T, heads, D]; keys, values: [blocks, kv_heads, block_size, D]; the rest as the definition has it."""

    q: Floats
    keys: Floats
    values: Floats
    starts: NDArray[np.int32]
    lens: NDArray[np.int32]
    tables: NDArray[np.int32]

    def expected(self, window: int | None = None) -> NDArray[np.float64]:
        return reference.paged_attention(
            self.q, np.nan_to_num(self.keys), np.nan_to_num(self.values), self.starts, self.lens, self.tables,
            DIM**-0.5, window,
        )  # fmt: skip


def on_cpu(batch: Batch, window: int | None = None) -> Floats:
    k_memory = np.ascontiguousarray(batch.keys.transpose(0, 1, 3, 2))
    out, team = np.full((len(batch.q), HEADS * DIM), np.nan, np.float32), ThreadTeam(2)
    team.run(
        cpu.paged_attention, 1, batch.q.reshape(len(batch.q), HEADS * DIM), DIM, np.float32(DIM**-0.5), window or 0,
        np.float32(0.0), np.zeros(0, np.float32), cpu.attention_tasks(batch.starts), batch.starts,
        batch.lens, batch.tables, k_memory, batch.values, out,
    )  # fmt: skip
    team.close()
    return out.reshape(batch.q.shape)


def on_tensors(batch: Batch, window: int | None = None, *, form: ModuleType, batch_invariant: bool) -> Floats:
    q, *rest = (torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE) for values in batch)
    out = torch.full_like(q, torch.nan)
    form.paged_attention(
        q, *rest, out, scale=DIM**-0.5, max_query_len=int(np.diff(batch.starts).max(initial=0)),
        max_seq_len=int(batch.lens.max(initial=0)), window=window, batch_invariant=batch_invariant,
    )  # fmt: skip
    found: Floats = out.cpu().numpy()
    return found


FORMS: dict[str, Callable[..., Floats]] = {
    "cpu": on_cpu,
    "torch": partial(on_tensors, form=plain, batch_invariant=False),
    "torch deterministic": partial(on_tensors, form=plain, batch_invariant=True),
    "triton": partial(on_tensors, form=triton, batch_invariant=False),
    "triton deterministic": partial(on_tensors, form=triton, batch_invariant=True),
}
every_form = pytest.mark.parametrize("form", FORMS)


def batch_of(counts: list[int], lens: list[int], *, poison: bool = True) -> Batch:
    """Random blocks for each sequence; what lies behind a sequence's end, and in nobody's blocks, is NaN."""
    generator = rng()
    per_sequence = max(-(-max(lens, default=1) // BLOCK_SIZE), 1)
    tables = generator.permutation(BLOCKS)[: per_sequence * len(lens)].reshape(len(lens), per_sequence)
    shape = BLOCKS, KV_HEADS, BLOCK_SIZE, DIM
    keys, values = normal(generator, *shape), normal(generator, *shape)
    if poison:
        seen = np.zeros((BLOCKS, BLOCK_SIZE), bool)
        for table, length in zip(tables.tolist(), lens, strict=True):
            for position in range(length):
                seen[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        for memory in (keys, values):
            memory.swapaxes(1, 2)[~seen] = np.nan
    q = normal(generator, sum(counts), HEADS, DIM)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return Batch(q, keys, values, starts, np.array(lens, np.int32), tables.astype(np.int32))


CASES = {
    "one token, its first": ([1], [1]),
    "one token behind others": ([1], [BLOCK_SIZE + 3]),
    "a block, full": ([BLOCK_SIZE], [BLOCK_SIZE]),
    "a block and one": ([BLOCK_SIZE + 1], [BLOCK_SIZE + 1]),
    "the last token of a block": ([1], [2 * BLOCK_SIZE]),
    "the first token of a block": ([1], [2 * BLOCK_SIZE + 1]),
    "sizes that divide nothing": ([7, 1, 19], [23, 37, 19]),
    "every sequence's first token": ([1, 1, 1], [1, 1, 1]),
    "long beside short": ([1, 3], [77, 3]),
}


@every_form
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(form: str, name: str) -> None:
    batch = batch_of(*CASES[name])
    assert relative_error(FORMS[form](batch), batch.expected()) < 4 * TOLERANCE["float32"]


@every_form
def test_without_tokens_there_is_nothing_to_do(form: str) -> None:
    assert FORMS[form](batch_of([], [])).shape == (0, HEADS, DIM)


@every_form
def test_the_first_token_of_a_sequence_is_its_own_value(form: str) -> None:
    """One key, of which the softmax is exactly one."""
    batch = batch_of([1, 1], [1, 1])
    for t in range(2):
        value = batch.values[batch.tables[t, 0], :, 0]  # [kv_heads, D]
        np.testing.assert_array_equal(FORMS[form](batch)[t], np.repeat(value, HEADS // KV_HEADS, axis=0))


@every_form
def test_equal_keys_share_their_values_equally(form: str) -> None:
    batch = batch_of([3], [35])
    batch.keys[:] = np.float32(0.25)
    values = np.nan_to_num(batch.values)[batch.tables[0]].transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)
    found = FORMS[form](batch)
    for t, visible in enumerate((33, 34, 35)):
        mean = np.repeat(values[:, :visible].mean(1, dtype=np.float64), HEADS // KV_HEADS, axis=0)
        np.testing.assert_allclose(found[t], mean, atol=1e-6)


@every_form
@pytest.mark.parametrize("size", [1e3, 1e15])
def test_scores_far_apart_leave_one_value_and_no_nan(form: str, size: float) -> None:
    """A key that points where the query does, among keys that point away: exp of the others is nothing."""
    batch = batch_of([1], [40])
    direction = np.sign(batch.q[0, 0])
    batch.q[0, :] = direction
    at = int(rng().integers(40))
    batch.keys[:] = -direction * np.float32(size)
    block, offset = batch.tables[0, at // BLOCK_SIZE], at % BLOCK_SIZE
    batch.keys[block, :, offset] = direction * np.float32(size)
    expected = np.repeat(batch.values[block, :, offset], HEADS // KV_HEADS, axis=0)
    np.testing.assert_allclose(FORMS[form](batch)[0], expected, rtol=1e-6, atol=1e-30)


@every_form
def test_where_blocks_lie_changes_no_bit(form: str) -> None:
    batch = batch_of([5, 1], [29, 48])
    moved = rng().permutation(BLOCKS)
    back = np.argsort(moved)
    elsewhere = batch._replace(
        keys=batch.keys[back], values=batch.values[back], tables=moved[batch.tables].astype(np.int32)
    )
    np.testing.assert_array_equal(FORMS[form](elsewhere), FORMS[form](batch))


@every_form
def test_sequences_may_share_their_first_blocks(form: str) -> None:
    """As after a hit in the prefix cache; one of them goes on in a block of its own."""
    batch = batch_of([1, 4], [40, 40], poison=False)
    batch.tables[1, :2] = batch.tables[0, :2]
    found = FORMS[form](batch)
    assert relative_error(found, batch.expected()) < 4 * TOLERANCE["float32"]
    batch.q[1:] = batch.q[0]
    batch.tables[1] = batch.tables[0]
    same = FORMS[form](batch._replace(starts=np.array([0, 1, 2], np.int32), q=batch.q[:2]))
    np.testing.assert_allclose(same[0], same[1], rtol=0, atol=2e-7)


@every_form
def test_a_window_of_all_keys_is_none_and_of_one_key_is_its_value(form: str) -> None:
    batch = batch_of([9], [30])
    np.testing.assert_array_equal(FORMS[form](batch, 30), FORMS[form](batch))
    found = FORMS[form](batch, 1)
    for t in range(9):
        block, offset = divmod(21 + t, BLOCK_SIZE)
        value = batch.values[batch.tables[0, block], :, offset]
        np.testing.assert_allclose(found[t], np.repeat(value, HEADS // KV_HEADS, axis=0), rtol=1e-6)
    for window in (2, 15, 16, 17):
        assert relative_error(FORMS[form](batch, window), batch.expected(window)) < 4 * TOLERANCE["float32"]


@every_form
def test_a_key_too_many_or_too_few_would_be_seen(form: str) -> None:
    batch = batch_of([4], [21], poison=False)
    found = FORMS[form](batch)
    for wrong in (batch._replace(lens=batch.lens + 1), batch._replace(lens=batch.lens - 1)):
        assert relative_error(found, wrong.expected()) > 1e-3
    assert relative_error(found, batch.expected(20)) > 1e-4
    assert math.isinf(relative_error(np.full_like(found, np.nan), batch.expected()))
