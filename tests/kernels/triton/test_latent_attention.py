"""Latent attention on tensors: heads whose keys and values are written out, and bits independent of the batch."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from app.kernels.mla_attention import reference, triton
from tests.kernels.cases import normal
from tests.kernels.tensors import DEVICE, DTYPES, TOLERANCE, error, numpy, tensor
from tests.kernels.torch_forms import latent_attention as plain
from tests.seeds import rng

RANK, OWN, TURNED, BLOCK, BLOCKS = 48, 16, 6, 16, 16
FORMS = pytest.mark.parametrize("form", [triton, plain], ids=["triton", "torch"])


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits in sequences that the interpreter is done with soon."""
    monkeypatch.setattr(triton, "_SPLIT_KEYS", 64)


def attend(
    form: ModuleType, absorbed: torch.Tensor, rotated: torch.Tensor, memory: torch.Tensor, counts: list[int],
    lens: list[int], tables: np.ndarray, *, batch_invariant: bool = True, bound: int = 0,
) -> torch.Tensor:  # fmt: skip
    """With an unused sequence at the end, as in a CUDA graph's bucket, into memory full of NaN."""
    out = torch.full_like(absorbed, torch.nan)
    starts = np.cumsum([0, *counts, 0]).astype(np.int32)
    form.latent_attention(
        absorbed, rotated, memory, tensor(starts), tensor(np.array([*lens, 0], np.int32)),
        tensor(np.concatenate([tables, tables[:1] * 0])), out, scale=0.2, max_query_len=max(counts),
        max_seq_len=max(bound, *lens), batch_invariant=batch_invariant,
    )  # fmt: skip
    return out


@FORMS
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("num_heads", "counts"), [(3, [1, 1]), (32, [1, 1]), (5, [17, 3])])
def test_equals_the_definition(form: ModuleType, num_heads: int, counts: list[int], batch_invariant: bool) -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    lens = [75, 20]
    tables = generator.permutation(BLOCKS)[:10].reshape(2, 5).astype(np.int32)
    memory = torch.full((BLOCKS, 1, BLOCK, RANK + TURNED), torch.nan, dtype=dtype, device=DEVICE)
    queries, wanted = [], []
    for table, length, count in zip(tables, lens, counts, strict=True):
        rows = tensor(normal(generator, length, RANK + TURNED), dtype)
        places = torch.arange(length)
        memory[tensor(table).long()[places // BLOCK], 0, places % BLOCK] = rows
        absorbed = tensor(normal(generator, length, num_heads, RANK), dtype)
        rotated = tensor(normal(generator, length, num_heads, TURNED), dtype)
        queries.append((absorbed[-count:], rotated[-count:]))
        # Heads whose keys and values are the latents themselves.
        heads = np.concatenate([numpy(absorbed), numpy(rotated)], 2)
        unit = np.broadcast_to(np.eye(RANK), (num_heads, RANK, RANK))
        latents = numpy(rows)
        wanted.append(reference.latent_attention(heads, latents[:, :RANK], latents[:, RANK:], unit, unit, 0.2)[-count:])
    given = [torch.cat(parts) for parts in zip(*queries, strict=True)]
    out = attend(form, *given, memory, counts, lens, tables, batch_invariant=batch_invariant, bound=150)
    expected = np.concatenate(wanted)
    assert error(out, expected) < TOLERANCE[dtype], dtype


@pytest.mark.usefixtures("rows_of_products_alike")
@FORMS
def test_a_query_has_the_same_bits_however_it_is_chunked_and_batched(form: ModuleType) -> None:
    """Several splits: side by side when decoding, one after the other in a chunk of a prompt."""
    generator, length, num_heads = rng(), 100, 3
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    memory = tensor(normal(generator, BLOCKS, 1, BLOCK, RANK + TURNED), dtype)
    tables = generator.permutation(BLOCKS)[:14].reshape(2, 7).astype(np.int32)
    absorbed = tensor(normal(generator, length, num_heads, RANK), dtype)
    rotated = tensor(normal(generator, length, num_heads, TURNED), dtype)
    whole = attend(form, absorbed[60:], rotated[60:], memory, [40], [length], tables[:1])
    for position in (63, 64, int(generator.integers(60, length))):  # 63 is a split's last key
        one = absorbed[position : position + 1], rotated[position : position + 1]
        alone = attend(form, *one, memory, [1], [position + 1], tables[:1], bound=2 * length)
        assert torch.equal(alone[0], whole[position - 60]), position
    cut = int(generator.integers(61, length))
    both = [torch.cat([part[:9], part[cut:]]) for part in (absorbed, rotated)]
    out = attend(form, *both, memory, [9, length - cut], [30, length], tables[::-1].copy())
    assert torch.equal(out[9:], whole[cut - 60 :])


@FORMS
def test_rotation_is_the_definitions_and_padding_is_not_stored(form: ModuleType) -> None:
    generator, num_heads = rng(), 3
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    angles = generator.uniform(-3, 3, (40, TURNED // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    queries = tensor(normal(generator, 4, num_heads * (OWN + TURNED)), dtype)
    latents = tensor(normal(generator, 4, RANK + TURNED), dtype)
    positions, slots = np.array([7, 0, 39, 3], np.int32), np.array([5, 37, BLOCKS * BLOCK, 16], np.int64)
    memory = torch.full((BLOCKS, 1, BLOCK, RANK + TURNED), torch.nan, dtype=dtype, device=DEVICE)
    before = numpy(queries).reshape(4, num_heads, -1), numpy(latents)
    form.rotate_and_store(
        queries, latents, tensor(positions), tensor(cos), tensor(sin), memory, tensor(slots), num_heads=num_heads
    )
    c, s = cos[positions], sin[positions]
    turned = reference.rotate_neighbours(before[0][..., OWN:], c[:, None], s[:, None])
    expected = np.concatenate([before[0][..., :OWN], turned], 2).reshape(4, -1)
    assert error(queries, expected) < TOLERANCE[dtype], dtype
    rows = np.concatenate([before[1][:, :RANK], reference.rotate_neighbours(before[1][:, RANK:], c, s)], 1)
    assert error(latents, rows) < TOLERANCE[dtype], dtype
    flat = memory.view(-1, RANK + TURNED)
    for token, slot in enumerate(slots):
        if slot < len(flat):
            assert torch.equal(flat[int(slot)], latents[token])
    assert int(torch.isfinite(flat).all(1).sum()) == 3


def test_operands_that_do_not_fit_are_refused() -> None:
    memory, queries = torch.zeros(2, 1, 16, 22, device=DEVICE), torch.zeros(1, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"do not fit: absorbed \(1, 3, 16\), rotated \(1, 3, 4\)"):
        attend(triton, queries, queries[..., :4], memory, [1], [1], np.zeros((1, 2), np.int32))
    cos, places = torch.zeros(4, 3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"do not fit: queries \(1, 48\) of 5 heads"):
        triton.rotate_and_store(queries.flatten(1), memory[0, 0, :1], places, cos, cos, memory, places, num_heads=5)
