"""What only encoders and embeddings compute: the definitions' numbers, and a row's bits its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from app.kernels.encoder_attention import cpu as attention_cpu
from app.kernels.encoder_attention import reference as attention_reference
from app.kernels.gelu import cpu as gelu_cpu
from app.kernels.gelu import reference as gelu_reference
from app.kernels.layer_norm import cpu as norm_cpu
from app.kernels.layer_norm import reference as norm_reference
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.pooling import cpu as pooling_cpu
from app.kernels.pooling import reference as pooling_reference
from tests.kernels.cases import normal
from tests.seeds import rng

EPS = np.float32(1e-12)
TOLERANCE = 2e-6


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    team = ThreadTeam(2)
    yield team
    team.close()


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 7), (5, 8), (4, 40), (13, 129)], ids=str)
def test_layer_norm_equals_its_definition_and_leaves_what_is_beside_it(
    team: ThreadTeam, shape: tuple[int, int]
) -> None:
    num_rows, size = shape
    x, weight, bias = normal(rng(), num_rows, size + 3) + 5, normal(rng(), size), normal(rng(), size)
    kept, beside = x[:, :size].copy(), x[:, size:].copy()
    expected = norm_reference.layer_norm(kept, weight, bias, float(EPS))
    out = np.full((num_rows, size), np.nan, np.float32)
    team.run(norm_cpu.layer_norm, 1, x, weight, bias, EPS, out)
    # What rounding the mean costs grows with how near to one another the values of a row are.
    spread = np.maximum(np.std(x64 := kept.astype(np.float64), axis=1, keepdims=True), 1e-6)
    bound = 2e-6 + 4 * 2.0**-23 * np.abs(x64).max(axis=1, keepdims=True, initial=0) / spread * np.abs(weight)
    assert (np.abs(out - expected) <= bound).all()
    np.testing.assert_array_equal(x[:, :size], out)
    np.testing.assert_array_equal(x[:, size:], beside)


def test_a_texts_first_states_are_the_norm_of_three_sums(team: ThreadTeam) -> None:
    words, positions, token_type = normal(rng(), 11, 24), normal(rng(), 9, 24), normal(rng(), 24)
    weight, bias = normal(rng(), 24), normal(rng(), 24)
    token_ids, position_ids = np.array([3, 0, 10, 3, 7], np.int32), np.array([0, 1, 2, 0, 8], np.int32)
    hidden, out = np.zeros((5, 32), np.float32), np.full((5, 24), np.nan, np.float32)
    team.run(
        norm_cpu.embed_normed, 1, token_ids, position_ids, words, positions, token_type, weight, bias, EPS, hidden, out
    )  # fmt: skip
    sums = words[token_ids] + token_type + positions[position_ids]
    expected = norm_reference.layer_norm(sums, weight, bias, float(EPS))
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(hidden[:, :24], out)


def test_gelu_is_the_one_of_erf_everywhere(team: ThreadTeam) -> None:
    x = np.concatenate([np.linspace(-9, 9, 4001), normal(rng(), 95), [0.0, -0.0, 1e-30, 3e38]]).astype(np.float32)
    x = x[: len(x) // 10 * 10].reshape(10, -1)
    out = np.full(x.shape, np.nan, np.float32)
    team.run(gelu_cpu.gelu, 1, x, out)
    expected = gelu_reference.gelu(x)
    assert np.abs(out - expected).max() < 1e-6


@pytest.mark.parametrize("lengths", [(1,), (16, 1), (63, 64, 65), (130, 5, 32, 33)], ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 10), (3, 16), (2, 40)])
def test_every_token_sees_its_whole_sequence_and_no_other(
    team: ThreadTeam, lengths: tuple[int, ...], num_heads: int, head_dim: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    size = -(-num_heads * head_dim // 16) * 16
    qkv = normal(rng(), int(starts[-1]), 3 * size)
    out = np.full((int(starts[-1]), num_heads * head_dim), np.nan, np.float32)
    arguments = size, size, head_dim, np.float32(head_dim**-0.5)
    team.run(attention_cpu.bidirectional_attention, 1, qkv, *arguments, starts, max(lengths), out)
    parts = [qkv[:, at : at + num_heads * head_dim].reshape(-1, num_heads, head_dim) for at in (0, size, 2 * size)]
    expected = attention_reference.bidirectional_attention(*parts, starts, head_dim**-0.5)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE)
    for first, end in itertools.pairwise(starts.tolist()):
        alone = np.full((end - first, num_heads * head_dim), np.nan, np.float32)
        own = np.array([0, end - first], np.int32)
        team.run(attention_cpu.bidirectional_attention, 1, qkv[first:end].copy(), *arguments, own, end - first, alone)
        np.testing.assert_array_equal(alone, out[first:end])


def test_a_sum_of_rows_has_the_same_bits_in_one_call_and_in_several(team: ThreadTeam) -> None:
    x = normal(rng(), 50, 12) * 10.0 ** rng().integers(-4, 4, (50, 1)).astype(np.float32)
    sums = np.zeros((3, 12))
    ranges = np.array([[0, 50], [7, 7], [3, 4]], np.int64)
    team.run(pooling_cpu.add_rows, 1, x, ranges, sums)
    np.testing.assert_array_equal(sums, pooling_reference.add_rows(x, ranges, np.zeros((3, 12))))
    in_parts = np.zeros((1, 12))
    for first, end in ((0, 1), (1, 17), (17, 50)):
        team.run(pooling_cpu.add_rows, 1, x, np.array([[first, end]]), in_parts)
    np.testing.assert_array_equal(in_parts[0], sums[0])
