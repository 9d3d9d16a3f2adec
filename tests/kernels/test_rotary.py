"""Rotation and the KV write in every form: the definition's numbers, each at its token's place and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike, NDArray

from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.rotary import cpu, reference, triton
from tests.kernels.cases import normal
from tests.kernels.tensors import FORMS, TOLERANCE, device_of, error, numpy, tensor
from tests.kernels.torch_forms import rotary as plain
from tests.pairwise import pairwise
from tests.seeds import rng

EPS, POSITIONS, BLOCKS, BLOCK_SIZE = 1e-6, 40, 3, 16
NARROW_NAN = 0x7FC0


class Heads(NamedTuple):
    num: int
    num_kv: int
    dim: int


class Operands(NamedTuple):
    """A step's operands on a device; caches hold NaN."""

    heads: Heads
    qkv: torch.Tensor
    positions: NDArray[np.int32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    kv_slots: NDArray[np.int64]
    norms: tuple[torch.Tensor, torch.Tensor] | None


def operands(
    num_tokens: int, heads: Heads, half: int, dtype: torch.dtype, device: torch.device, *, with_norm: bool
) -> Operands:
    generator = rng()
    angles = normal(generator, POSITIONS, half) * 3
    return Operands(
        heads,
        tensor(normal(generator, num_tokens, (heads.num + 2 * heads.num_kv) * heads.dim), dtype, device),
        generator.integers(0, POSITIONS, num_tokens).astype(np.int32),
        np.cos(angles),
        np.sin(angles),
        generator.permutation(BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int64),
        (tensor(normal(generator, heads.dim), None, device), tensor(normal(generator, heads.dim), None, device))
        if with_norm
        else None,
    )


def run(form: str, given: Operands, memory: DTypeLike = np.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate given.qkv in place; returns caches [blocks, kv_heads, block_size, D], NaN where nothing was written.

    memory: how the form "cpu" stores keys and values, in float32 or as bits of bfloat16.
    """
    num, num_kv, dim = given.heads
    device, dtype = given.qkv.device, given.qkv.dtype
    if form == "cpu":
        # Slices and heads are padded to whole vectors there; the padding stays as it is.
        q_size, kv_size, wide = num * dim + 8, num_kv * dim + 8, dim + 8
        sizes = (num * dim, num_kv * dim, num_kv * dim)
        padded = [torch.nn.functional.pad(part, (0, 8)) for part in given.qkv.split(sizes, dim=1)]
        qkv = torch.cat(padded, dim=1).numpy()
        fill = np.nan if memory is np.float32 else NARROW_NAN
        k_memory = np.full((BLOCKS, num_kv, wide, BLOCK_SIZE), fill, memory)
        v_memory = np.full((BLOCKS, num_kv, BLOCK_SIZE, wide), fill, memory)
        none = np.empty(0, np.float32)
        q_norm, k_norm = (none, none) if given.norms is None else (norm.numpy() for norm in given.norms)
        team = ThreadTeam(2)
        team.run(
            cpu.rotate_and_store, 1, qkv, given.positions, given.kv_slots, given.cos, given.sin, q_norm, k_norm,
            np.float32(EPS), k_memory, v_memory, num, num_kv, dim, q_size, kv_size,
        )  # fmt: skip
        team.close()
        np.testing.assert_array_equal(k_memory[:, :, dim:], fill)
        np.testing.assert_array_equal(v_memory[..., dim:], fill)
        assert not qkv[:, num * dim : q_size].any()
        given.qkv[:, : num * dim] = torch.from_numpy(qkv[:, : num * dim])
        return torch.from_numpy(k_memory[:, :, :dim].swapaxes(2, 3).copy()), torch.from_numpy(v_memory[..., :dim])
    shape = BLOCKS, num_kv, BLOCK_SIZE, dim
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    q_norm, k_norm = given.norms or (None, None)  # type: ignore[assignment]
    (plain if form == "torch" else triton).rotate_and_write(
        given.qkv, tensor(given.positions), tensor(given.cos), tensor(given.sin), k_cache, v_cache,
        tensor(given.kv_slots), num_heads=num, num_kv_heads=num_kv, q_norm=q_norm, k_norm=k_norm, eps=EPS,
    )  # fmt: skip
    return k_cache, v_cache


def expect(given: Operands) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Queries and caches by the definition, of the values that the operands hold; taken before a form runs."""
    num, num_kv, dim = given.heads
    k_cache, v_cache = np.full((2, BLOCKS, num_kv, BLOCK_SIZE, dim), np.nan)
    heads = numpy(given.qkv).reshape(len(given.qkv), num + 2 * num_kv, dim)
    q_norm, k_norm = (None, None) if given.norms is None else (numpy(norm) for norm in given.norms)
    queries = reference.rotate_and_write(
        heads, given.positions, given.cos, given.sin, k_cache, v_cache, given.kv_slots, num, q_norm, k_norm, EPS
    )
    return queries, k_cache, v_cache


def check(given: Operands, form: str) -> None:
    num, num_kv, dim = given.heads
    expected, *expected_caches = expect(given)
    before, tolerance = given.qkv.clone(), TOLERANCE[given.qkv.dtype]
    caches = run(form, given)
    assert error(given.qkv[:, : num * dim], expected.reshape(len(before), num * dim)) < tolerance
    assert torch.equal(given.qkv[:, num * dim :], before[:, num * dim :]), "keys and values stay where they came from"
    for cache, wanted in zip(caches, expected_caches, strict=True):
        written = ~np.isnan(wanted)
        assert np.array_equal(np.isnan(numpy(cache)), ~written)
        where = torch.from_numpy(written).to(cache.device)
        assert error(cache[where], wanted[written]) < tolerance
    assert written.sum() == (given.kv_slots < BLOCKS * BLOCK_SIZE).sum() * num_kv * dim


@pairwise(
    {
        "with_norm": [False, True],
        "num_tokens, heads": [(0, (4, 2, 16)), (1, (1, 1, 2)), (5, (9, 3, 24)), (7, (4, 4, 40))],
        "form, dtype": FORMS,
    }
)
def test_equals_the_definition(
    form: str, dtype: torch.dtype, num_tokens: int, heads: tuple[int, int, int], with_norm: bool
) -> None:
    check(operands(num_tokens, Heads(*heads), heads[2] // 2, dtype, device_of(form), with_norm=with_norm), form)


@pairwise({"form, dtype": FORMS, "half": [1, 5], "with_norm": [False, True]})
def test_what_lies_behind_the_rotated_part_of_a_head_stays(
    form: str, dtype: torch.dtype, half: int, with_norm: bool
) -> None:
    check(operands(5, Heads(6, 2, 24), half, dtype, device_of(form), with_norm=with_norm), form)


@pytest.mark.parametrize(("form", "dtype"), [case for case in FORMS if case[0] != "cpu"], ids=str)
def test_padding_of_a_bucket_is_not_written(form: str, dtype: torch.dtype) -> None:
    """A kv_slot at or beyond the caches' end; the CPU's steps have no padding."""
    given = operands(6, Heads(2, 1, 8), 4, dtype, device_of(form), with_norm=True)
    given.kv_slots[[1, 4]] = BLOCKS * BLOCK_SIZE, BLOCKS * BLOCK_SIZE + 7
    check(given, form)


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_a_token_has_the_same_bits_alone_and_among_others(form: str, dtype: torch.dtype) -> None:
    given = operands(9, Heads(6, 2, 16), 8, dtype, device_of(form), with_norm=True)
    fresh = given.qkv.clone()
    together = run(form, given)
    for t in range(9):
        lone = given._replace(
            qkv=fresh[t : t + 1].clone(), positions=given.positions[t : t + 1], kv_slots=given.kv_slots[t : t + 1]
        )
        alone = run(form, lone)
        assert torch.equal(lone.qkv[0], given.qkv[t])
        block, offset = divmod(int(given.kv_slots[t]), BLOCK_SIZE)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[block, :, offset], all_of_them[block, :, offset])


def test_keys_and_values_are_rounded_for_memory_in_bfloat16() -> None:
    given = operands(9, Heads(6, 2, 24), 12, torch.float32, torch.device("cpu"), with_norm=True)
    fresh = given._replace(qkv=given.qkv.clone())
    wide = run("cpu", given)
    narrow = run("cpu", fresh, np.uint16)
    assert torch.equal(fresh.qkv, given.qkv)
    for rounded, exact in zip(narrow, wide, strict=True):
        written = ~np.isnan(exact.numpy())
        np.testing.assert_array_equal(rounded.numpy()[written], bfloat16_bits(exact.numpy()[written]))
        assert (rounded.numpy()[~written] == NARROW_NAN).all()


def test_the_first_position_turns_nothing() -> None:
    """Angles are multiples of the position: at 0 a query is what it was, in every bit."""
    given = operands(3, Heads(2, 1, 16), 8, torch.float32, torch.device("cpu"), with_norm=False)
    given = given._replace(cos=np.ones_like(given.cos), sin=np.zeros_like(given.sin))
    for form in ("cpu", "torch", "triton"):
        before = given.qkv.clone()
        run(form, given)
        assert torch.equal(given.qkv, before), form


def test_operands_that_do_not_fit_are_refused() -> None:
    given = operands(3, Heads(2, 1, 16), 8, torch.float32, device_of("triton"), with_norm=True)
    for wrong in (
        given._replace(heads=Heads(3, 1, 16)),
        given._replace(positions=given.positions[1:]),
        given._replace(kv_slots=given.kv_slots[1:]),
        given._replace(sin=given.sin[:, 1:]),
        given._replace(cos=np.ones((40, 9), np.float32), sin=np.ones((40, 9), np.float32)),
    ):
        with pytest.raises(ValueError, match="rotation operands do not fit"):
            run("triton", wrong)
    with pytest.raises(ValueError, match="come together"):
        triton.rotate_and_write(
            given.qkv, tensor(given.positions), tensor(given.cos), tensor(given.sin), *run("triton", given),
            tensor(given.kv_slots), num_heads=2, num_kv_heads=1, q_norm=tensor(np.ones(16, np.float32)),
        )  # fmt: skip
