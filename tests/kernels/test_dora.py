"""DoRA's scale in every form is the definition's: from packed weights on the CPU, from tensors of any type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.dora import cpu, reference
from app.kernels.dora.torch import dora_scale as dora_scale_of_gpu
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import pack
from tests import seeds
from tests.engine.cuda.exact_operations import ExactOperations
from tests.kernels.cases import normal
from tests.kernels.tensors import DTYPES, numpy, tensor
from tests.kernels.torch_forms import dora as fixed

Floats = NDArray[np.float32]
Form = Callable[[Floats, Floats, Floats, Floats], Floats]


def on_cpu(magnitude: Floats, weight: Floats, a: Floats, b: Floats, threads: int = 2) -> Floats:
    team = ThreadTeam(threads)
    try:
        return cpu.dora_scale(team, magnitude, pack(weight), a, b)
    finally:
        team.close()


def on_tensors(dora_scale: Callable[..., torch.Tensor]) -> Form:
    def run(*given: Floats) -> Floats:
        scale = dora_scale(*map(tensor, given))
        assert scale.dtype == torch.float32
        found: Floats = scale.cpu().numpy()
        return found

    return run


FORMS: dict[str, Form] = {
    "cpu": on_cpu,
    "torch": on_tensors(dora_scale_of_gpu),
    "torch in a fixed order": on_tensors(fixed.dora_scale),
}


def operands(d_out: int, d_in: int, rank: int) -> tuple[Floats, Floats, Floats, Floats]:
    generator = seeds.rng()
    magnitude = generator.uniform(0.5, 2, d_out).astype(np.float32)
    return magnitude, normal(generator, d_out, d_in), normal(generator, rank, d_in), normal(generator, rank, d_out)


def allowed(expected: Floats, magnitude: Floats, weight: Floats, a: Floats, b: Floats) -> NDArray[np.float64]:
    """W and BA may all but cancel in a row, above all where there is one weight: what rounding does to the parts of
    the squared norm is then large beside what they add up to."""
    parts = np.linalg.norm(weight, axis=1) + np.abs(b.T) @ np.linalg.norm(a, axis=1)
    condition = (parts * expected / magnitude) ** 2
    bound: NDArray[np.float64] = 1e-6 * condition * expected
    return bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("d_out", "d_in", "rank"),
    [(1, 1, 1), (16, 5, 2), (37, 24, 8), (20, 130, 40), (17, 33, 1), (33, 16, 64), (15, 40, 0)],
)
def test_the_scale_is_the_definitions(form: str, d_out: int, d_in: int, rank: int) -> None:
    given = operands(d_out, d_in, rank)
    expected = reference.dora_scale(*given)
    error = np.abs(FORMS[form](*given) - expected)
    assert (error <= allowed(expected, *given)).all(), (error, expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_measure_sees_a_scale_without_its_cross_term(form: str) -> None:
    """‖W‖² + ‖BA‖² is another norm; and the delta counts: without it the scale is another one too."""
    magnitude, weight, a, b = given = operands(20, 130, 8)
    found, bound = FORMS[form](*given), allowed(reference.dora_scale(*given), *given)
    squares = (weight.astype(np.float64) ** 2).sum(1) + ((b.T.astype(np.float64) @ a) ** 2).sum(1)
    for wrong in (magnitude / np.sqrt(squares), magnitude / np.linalg.norm(weight, axis=1)):
        assert (np.abs(found - wrong) > 10 * bound).any()


@pytest.mark.parametrize("form", FORMS)
def test_a_magnitude_of_the_merged_rows_norm_changes_nothing(form: str) -> None:
    """Where DoRA begins, m = ‖W‖ and B = 0: the scale is one."""
    _, weight, a, b = operands(21, 48, 4)
    magnitude = np.linalg.norm(weight.astype(np.float64), axis=1).astype(np.float32)
    np.testing.assert_allclose(FORMS[form](magnitude, weight, a, np.zeros_like(b)), 1.0, rtol=3e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vanishing", [False, True])
def test_a_row_without_a_direction_has_scale_zero(form: str, vanishing: bool) -> None:
    weight = np.ones((3, 4), np.float32)
    a, b = np.ones((1, 4), np.float32), np.zeros((1, 3), np.float32)
    if vanishing:
        b[0, 1] = -1  # W + BA is zero there, W is not
    else:
        weight[1] = 0
    one = np.ones(3, np.float32)
    for scale in (reference.dora_scale(one, weight, a, b), FORMS[form](one, weight, a, b)):
        np.testing.assert_array_equal(scale, np.array([0.5, 0.0, 0.5], np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_has_the_magnitudes_sign_and_size(form: str) -> None:
    magnitude, *rest = operands(18, 40, 3)
    factors = np.array([-2.0, 0.0, 0.5] * 6, np.float32)
    np.testing.assert_array_equal(FORMS[form](magnitude * factors, *rest), FORMS[form](magnitude, *rest) * factors)


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    given = operands(150, 70, 5)
    alone = on_cpu(*given, threads=1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(on_cpu(*given, threads=threads), alone)


@pytest.mark.parametrize("rows_at_once", [1, 7, 64])
def test_the_bits_do_not_depend_on_how_many_rows_exist_at_once(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.from_numpy(values) for values in operands(50, 70, 5)]
    with ExactOperations():
        whole = fixed.dora_scale(*tensors)
    monkeypatch.setattr(fixed, "_ROWS", rows_at_once)
    assert torch.equal(fixed.dora_scale(*tensors), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_any_type_are_widened_before_they_are_squared(dtype: torch.dtype) -> None:
    """Half precision ends at 65,504: squares of 300 do not fit there."""
    magnitude, *rest = operands(12, 40, 3)
    tensors = [tensor(values * 300, dtype) for values in rest]
    expected = reference.dora_scale(magnitude, *(numpy(values).astype(np.float32) for values in tensors))
    for form in (dora_scale_of_gpu, fixed.dora_scale):
        np.testing.assert_allclose(form(tensor(magnitude), *tensors).cpu().numpy(), expected, rtol=1e-6)
