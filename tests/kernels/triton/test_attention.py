"""Attention on tensors: equal to the definition; blind to foreign memory; bits independent of chunks and batch."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.paged_attention import reference, triton
from tests.kernels.cases import normal
from tests.kernels.tensors import DEVICE, DTYPES, TOLERANCE, error, numpy, tensor
from tests.kernels.torch_forms import paged_attention as plain
from tests.pairwise import pairwise
from tests.seeds import rng


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits in sequences that the interpreter is done with soon."""
    monkeypatch.setattr(triton, "_SPLIT_KEYS", 128)


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def sinks(self) -> torch.Tensor | None:
        """Of each head, from far below its scores to far above them."""
        return torch.linspace(-5, 9, self.heads).to(DEVICE) if self.has_sinks else None


CASES = [
    Case(9, 3, 64, 16),
    Case(4, 4, 16, 32, has_sinks=True),
    Case(8, 1, 24, 16, softcap=3.0),
    Case(2, 1, 128, 48),
    Case(6, 2, 32, 16, window=1),
    Case(6, 2, 32, 16, window=37, softcap=5.0, has_sinks=True),
]


class Sequences(NamedTuple):
    """Random queries over random blocks; whatever no query may see is NaN."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: NDArray[np.int32]
    lens: NDArray[np.int32]
    tables: NDArray[np.int32]


def starts_of(counts: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)


def sequences(case: Case, counts: list[int], longest: int, dtype: torch.dtype) -> Sequences:
    """`counts` queries each, at the ends of sequences of up to `longest` keys, one of exactly that many."""
    generator = rng()
    lens = np.array([count + int(generator.integers(0, longest - count + 1)) for count in counts], np.int32)
    lens[int(generator.integers(len(counts)))] = longest
    per_sequence = -(-longest // case.block_size)
    tables = generator.permutation(per_sequence * len(counts)).reshape(len(counts), per_sequence).astype(np.int32)
    shape = (tables.size + 1, case.kv_heads, case.block_size, case.head_dim)
    keys, values = np.full(shape, np.nan), np.full(shape, np.nan)
    for b, length in enumerate(lens.tolist()):
        oldest = 0 if case.window is None else max(0, length - counts[b] + 1 - case.window)
        for position in range(oldest, length):
            block, offset = tables[b, position // case.block_size], position % case.block_size
            keys[block, :, offset] = normal(generator, case.kv_heads, case.head_dim)
            values[block, :, offset] = normal(generator, case.kv_heads, case.head_dim)
    q = tensor(normal(generator, sum(counts), case.heads, case.head_dim), dtype)
    return Sequences(q, tensor(keys, dtype), tensor(values, dtype), starts_of(counts), lens, tables)


FORMS = pytest.mark.parametrize("form", [triton, plain], ids=["triton", "torch"])


def run(
    case: Case, s: Sequences, form: ModuleType = triton, *, batch_invariant: bool = False, max_seq_len: int = 0
) -> torch.Tensor:
    """With two unused sequences at the end, as in a CUDA graph's bucket, and NaN where nothing is written."""
    counts = np.diff(s.starts)
    starts = np.concatenate([s.starts, s.starts[-1:], s.starts[-1:]])
    lens = np.concatenate([s.lens, np.zeros(2, np.int32)])
    tables = np.concatenate([s.tables, np.zeros((2, s.tables.shape[1]), np.int32)])
    out = torch.full((len(s.q) + 2, *s.q.shape[1:]), torch.nan, dtype=s.q.dtype, device=DEVICE)
    q = torch.cat([s.q, torch.full_like(out[:2], torch.nan)])
    form.paged_attention(
        q, s.keys, s.values, tensor(starts), tensor(lens), tensor(tables), out, scale=case.head_dim**-0.5,
        max_query_len=int(counts.max()), max_seq_len=max(max_seq_len, int(lens.max())), window=case.window,
        softcap=case.softcap, sinks=case.sinks, batch_invariant=batch_invariant,
    )  # fmt: skip
    assert torch.isnan(out[len(s.q) :]).all()
    return out[: len(s.q)]


@FORMS
@pairwise({"case": CASES, "counts": [[1, 1, 1], [33, 1, 5]], "batch_invariant": [False, True]})
def test_equals_the_definition(form: ModuleType, case: Case, counts: list[int], batch_invariant: bool) -> None:
    dtype = DTYPES[int(rng().integers(len(DTYPES)))]
    longest = 290 if counts[0] == 1 else 90  # while decoding, one sequence has more than one split
    s = sequences(case, counts, longest, dtype)
    out = run(case, s, form, batch_invariant=batch_invariant, max_seq_len=2 * longest)
    clean = (np.nan_to_num(numpy(t)) for t in (s.keys, s.values))
    expected = reference.paged_attention(
        numpy(s.q),
        *clean,
        s.starts,
        s.lens,
        s.tables,
        case.head_dim**-0.5,
        case.window,
        case.softcap,
        None if case.sinks is None else numpy(case.sinks),
    )
    assert error(out, expected) < TOLERANCE[dtype], dtype


@pytest.mark.usefixtures("rows_of_products_alike")
@FORMS
@pytest.mark.parametrize("case", [CASES[2], CASES[5]])
def test_a_query_has_the_same_bits_however_it_is_chunked_and_batched(form: ModuleType, case: Case) -> None:
    """Several splits: side by side when decoding, one after the other in a chunk of a prompt."""
    generator, length = rng(), 150
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    s = sequences(case._replace(window=None), [length, 1, 1], length, dtype)
    s = s._replace(keys=s.keys.nan_to_num(), values=s.values.nan_to_num())

    def attend(counts: list[int], lens: list[int], q: torch.Tensor, order: list[int], bound: int) -> torch.Tensor:
        part = Sequences(q, s.keys, s.values, starts_of(counts), np.array(lens, np.int32), s.tables[order])
        return run(case, part, form, batch_invariant=True, max_seq_len=bound)

    tail = attend([40], [length], s.q[length - 40 : length], [0], length)  # the last forty queries, in one chunk
    for position in [
        length - 23,
        length - 22,
        int(generator.integers(length - 40, length)),
    ]:  # 127 is a split's last key
        alone = attend([1], [position + 1], s.q[position : position + 1], [0], 2 * length)
        assert torch.equal(alone[0], tail[position - length + 40]), position
        other = tensor(normal(generator, 2, case.heads, case.head_dim), dtype)
        q = torch.cat([other[:1], s.q[position : position + 1], other[1:]])
        batched = attend([1, 1, 1], [length, position + 1, 77], q, [1, 0, 2], length)
        assert torch.equal(batched[1], alone[0]), position
    cuts = sorted({0, 40, *generator.integers(1, 40, 3).tolist()})
    for first, end in itertools.pairwise(cuts):
        counts = [int(generator.integers(1, 9)), end - first]
        q = tensor(normal(generator, sum(counts), case.heads, case.head_dim), dtype)
        q[counts[0] :] = s.q[length - 40 + first : length - 40 + end]
        out = attend(counts, [counts[0] + 30, length - 40 + end], q, [1, 0], length)
        assert torch.equal(out[counts[0] :], tail[first:end]), (first, end)


def test_operands_that_do_not_fit_are_refused() -> None:
    case = CASES[0]
    s = sequences(case, [1, 1], 20, torch.float32)
    for wrong in (
        s._replace(q=s.q[:, :8].contiguous()),
        s._replace(values=s.values[:, :, :8]),
        s._replace(keys=s.keys.half()),
        s._replace(starts=s.starts[1:]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            run(case, wrong)
    with pytest.raises(ValueError, match=r"\(3,\) sinks for 9 heads"):
        triton.paged_attention(
            s.q, s.keys, s.values, tensor(s.starts), tensor(s.lens), tensor(s.tables), s.q.clone(), scale=1.0,
            max_query_len=1, max_seq_len=20, sinks=torch.zeros(3, device=DEVICE),
        )  # fmt: skip
    with pytest.raises(ValueError, match="window is 0"):
        run(case._replace(window=0), s)
