"""RMS norm in every form: the definition's numbers, nothing written beside them, a row's bits its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.norms import cpu, reference, triton
from tests.kernels.cases import normal
from tests.kernels.tensors import FORMS, TOLERANCE, assert_poison_left, device_of, error, numpy, poisoned, tensor
from tests.kernels.torch_forms import norms as plain
from tests.pairwise import pairwise
from tests.seeds import rng

EPS = 1e-5
#: Rows and their width: none, one, widths below, at and beyond the lanes and blocks that forms work in.
SHAPES = [(0, 8), (1, 1), (1, 576), (3, 7), (5, 8), (4, 40), (13, 129)]


def run(form: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, threads: int = 2) -> None:
    if form == "cpu":
        team = ThreadTeam(threads)
        team.run(cpu.rms_norm, 1, x.numpy(), weight.numpy(), np.float32(EPS), out.numpy())
        team.close()
    else:
        (plain if form == "torch" else triton).rms_norm(x, weight, EPS, out)


@pairwise({"shape": SHAPES, "form, dtype": FORMS}, strength=1)
def test_equals_the_definition(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator, device = rng(), device_of(form)
    x, weight = tensor(normal(generator, *shape), dtype, device), tensor(normal(generator, shape[1]), None, device)
    memory, out = poisoned(*shape, dtype, device)
    run(form, x, weight, out)
    assert error(out, reference.rms_norm(numpy(x), numpy(weight), EPS)) < TOLERANCE[dtype]
    assert_poison_left(memory, *shape)


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_rows_of_any_size_keep_their_proportions(form: str, dtype: torch.dtype) -> None:
    """Squares of a row's numbers reach far beyond the numbers; a row of zeros has no direction and stays zero."""
    device = device_of(form)
    sizes = np.array([[1e-4], [1.0], [1e4]], np.float32)
    x = tensor(np.concatenate([normal(rng(), 3, 24) * sizes, np.zeros((1, 24), np.float32)]), dtype, device)
    _, out = poisoned(4, 24, dtype, device)
    run(form, x, tensor(np.ones(24, np.float32), None, device), out)
    expected = reference.rms_norm(numpy(x), np.ones(24), EPS)
    for row in range(3):
        assert error(out[row], expected[row]) < TOLERANCE[dtype], row
    assert not out[3].any()


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(form: str, dtype: torch.dtype) -> None:
    generator, device = rng(), device_of(form)
    x = tensor(normal(generator, 11, 72), dtype, device)
    weight = tensor(normal(generator, 72), None, device)
    _, together = poisoned(11, 72, dtype, device)
    run(form, x, weight, together, threads=3)
    for row in range(11):
        _, alone = poisoned(1, 72, dtype, device)
        run(form, x[row : row + 1], weight, alone, threads=1)
        assert torch.equal(alone[0], together[row]), row


@pairwise({"form, dtype": [case for case in FORMS if case[0] != "cpu"], "num_rows": [0, 1, 5]}, strength=1)
def test_a_residual_takes_the_sum_and_its_norm_is_returned(form: str, dtype: torch.dtype, num_rows: int) -> None:
    generator, width = rng(), int(rng().integers(1, 80))
    x, residual = (tensor(normal(generator, num_rows, width), dtype) for _ in range(2))
    weight, total = tensor(normal(generator, width)), (x.float() + residual.float()).to(dtype)
    memory, out = poisoned(num_rows, width, dtype)
    (plain if form == "torch" else triton).rms_norm(x, weight, EPS, out, residual)
    assert error(out, reference.rms_norm(numpy(total), numpy(weight), EPS)) < TOLERANCE[dtype]
    assert_poison_left(memory, num_rows, width)
    assert torch.equal(residual, total), "rounded before its norm is taken"


def test_rows_are_gathered_in_the_order_asked_for() -> None:
    """The states that are sampled from: any rows, one of them twice, in any order."""
    generator = rng()
    x, weight = normal(generator, 6, 40), normal(generator, 24)
    rows = np.array([5, 0, 3, 3], np.int32)
    out = np.full((4, 24), np.nan, np.float32)
    for threads in (1, 3):
        team = ThreadTeam(threads)
        team.run(cpu.gather_normed, 1, x, rows, weight, np.float32(EPS), out)
        team.close()
        expected = reference.rms_norm(x[rows, :24], weight, EPS)
        assert error(torch.from_numpy(out), expected) < TOLERANCE[torch.float32]
        assert np.array_equal(out[2], out[3])
    untouched = np.full((0, 24), np.nan, np.float32)
    ThreadTeam(1).run(cpu.gather_normed, 1, x, rows[:0], weight, np.float32(EPS), untouched)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight = tensor(np.ones((3, 8), np.float32)), tensor(np.ones(8, np.float32))
    for wrong_weight, out, residual in ((weight[1:], x, None), (weight, x[:2], None), (weight, x, x[1:])):
        with pytest.raises(ValueError, match=r"norm operands do not fit: x \(3, 8\)"):
            triton.rms_norm(x, wrong_weight, EPS, out.clone(), residual)
