"""Gated activations in every form: the definition's numbers at any size, and an element's bits its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.activation import cpu, reference, triton
from app.kernels.activation.reference import Activation
from tests.engine.cuda.exact_operations import ExactOperations
from tests.kernels.cases import normal
from tests.kernels.tensors import FORMS, TOLERANCE, assert_poison_left, device_of, error, numpy, poisoned, tensor
from tests.kernels.torch_forms import activation as plain
from tests.pairwise import pairwise
from tests.seeds import rng

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
SHAPES = [(0, 8), (1, 1), (1, 7), (5, 8), (3, 37), (6, 70)]


@pytest.fixture(autouse=True)
def narrow_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of Triton's programs in rows that the interpreter is done with soon."""
    monkeypatch.setattr(triton, "_GATED_COLUMNS", 32)


def run(
    form: str, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor, cuts: tuple[int, ...] = ()
) -> None:
    """`cuts`: columns at which one CPU thread's piece ends and the next begins."""
    if form == "cpu":
        width = out.shape[1]
        for first, end in zip((0, *cuts), (*cuts, width), strict=True):
            cpu.activate(gate_up.numpy(), width, activation == "gelu_tanh", first, end, out.numpy())
    else:
        (plain if form == "torch" else triton).gated_activation(gate_up, out, activation)


def test_a_clamped_activation_equals_the_definition_on_both_sides_of_its_limit() -> None:
    gate_up = np.concatenate([normal(rng(), 5, 74) * 3, np.full((1, 74), 1e4, np.float32), np.full((1, 74), -1e4)])
    gate_up = gate_up.astype(np.float32)
    out = np.full((7, 37), np.nan, np.float32)
    for first, end in ((0, 8), (8, 37)):
        cpu.activate_clamped(gate_up, 37, np.float32(2.0), np.float32(1.702), first, end, out)
    expected = reference.clamped_gated_activation(np.maximum(gate_up, -200), 2.0, 1.702)
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "dtype"), [case for case in FORMS if case[0] != "cpu"], ids=str)
def test_a_clamped_activation_of_tensors_is_the_definition_too(form: str, dtype: torch.dtype) -> None:
    device, kernel = device_of(form), plain if form == "torch" else triton
    rows = np.concatenate([normal(rng(), 5, 74) * 3, np.full((1, 74), 1e4), np.full((1, 74), -1e4)])
    gate_up = tensor(rows, dtype, device)
    memory, out = poisoned(7, 37, dtype, device)
    kernel.gated_activation(gate_up, out, "silu", 2.0, 1.702)
    expected = reference.clamped_gated_activation(np.maximum(numpy(gate_up), -200), 2.0, 1.702)
    assert error(out, expected, np.ones_like(expected)) < TOLERANCE[dtype]
    assert_poison_left(memory, 7, 37)


@pairwise({"activation": ACTIVATIONS, "shape": SHAPES, "form, dtype": FORMS})
def test_equals_the_definition(form: str, dtype: torch.dtype, shape: tuple[int, int], activation: Activation) -> None:
    device, (num_rows, width) = device_of(form), shape
    gate_up = tensor(normal(rng(), num_rows, 2 * width) * 4, dtype, device)
    memory, out = poisoned(*shape, dtype, device)
    run(form, gate_up, activation, out)
    expected = reference.gated_activation(numpy(gate_up), activation)
    # Relative to `up` at least: of gates far below zero there is next to nothing left.
    assert error(out, expected, numpy(gate_up)[:, width:]) < TOLERANCE[dtype]
    assert_poison_left(memory, *shape)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_gates_far_from_zero_are_open_or_shut(form: str, dtype: torch.dtype, activation: Activation) -> None:
    """exp(10,000) has no value; a gate that large lets all of itself through, its negative nothing. In vectors and in
    what is left over behind them."""
    device = device_of(form)
    gate = np.tile(np.array([10_000.0, -10_000.0, 100.0, -100.0, 0.0], np.float32), 3)
    gate_up = tensor(np.concatenate([gate, np.full(15, 2.0, np.float32)])[None], dtype, device)
    _, out = poisoned(1, 15, dtype, device)
    run(form, gate_up, activation, out)
    wanted = np.tile([20_000.0, 0.0, 200.0, 0.0, 0.0], 3)
    np.testing.assert_allclose(numpy(out[0]), numpy(tensor(wanted, dtype)), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(form: str, dtype: torch.dtype, activation: Activation) -> None:
    device = device_of(form)
    gate_up = tensor(normal(rng(), 9, 2 * 40) * 3, dtype, device)
    _, together = poisoned(9, 40, dtype, device)
    run(form, gate_up, activation, together)
    for row in range(9):
        _, alone = poisoned(1, 40, dtype, device)
        run(form, gate_up[row : row + 1], activation, alone, cuts=(16, 32))
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_left_over_behind_whole_vectors_is_as_near_as_what_is_in_them(activation: Activation) -> None:
    gate_up = normal(rng(), 1, 2 * 15) * 2
    out = np.full((1, 15), np.nan, np.float32)
    cpu.activate(gate_up, 15, activation == "gelu_tanh", 0, 15, out)
    exact = reference.gated_activation(gate_up, activation)
    assert (np.abs(out - exact) <= 4e-6 * np.abs(gate_up[:, 15:]) + 1e-30).all()


@pytest.mark.usefixtures("torch_on_two_threads")
@pytest.mark.parametrize("width", [37, 72])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_torch_does_not_show_where_a_threads_part_ends(activation: Activation, width: int) -> None:
    """More elements than torch gives one thread, and an odd number of rows: two threads meet inside of one."""
    gate_up = torch.from_numpy(normal(rng(), 1201, 2 * width) * 3)
    together, alone = torch.empty(1201, width), torch.empty(1201, width)
    with ExactOperations():
        plain.gated_activation(gate_up, together, activation)
    for row in range(590, 612):  # the threads meet in row 600
        plain.gated_activation(gate_up[row : row + 1], alone[row : row + 1], activation)
    np.testing.assert_array_equal(alone[590:612].numpy(), together[590:612].numpy())


def test_operands_that_do_not_fit_are_refused() -> None:
    gate_up, out = torch.zeros(2, 16), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="'relu'"):
        triton.gated_activation(gate_up, out, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of \(2, 16\) does not fit out \(2, 7\)"):
        triton.gated_activation(gate_up, out[:, :7], "silu")
