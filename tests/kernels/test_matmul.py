"""Products of fixed order: equal to the definition in every form, and the same bits for a row in any batch.

On the CPU weights are packed; on tensors they lie as they came, in any type.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul import cpu, reference, triton
from tests.kernels import tensors
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.tensors import DEVICE, DTYPES, assert_poison_left, error, numpy, poisoned, tensor
from tests.kernels.torch_forms import matmul as plain
from tests.pairwise import pairwise
from tests.seeds import rng

SHAPES = [(1, 1), (16, 8), (17, 5), (35, 48), (100, 130), (192, 576)]


@pairwise({"shape": SHAPES, "num_rows": [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 19, 64], "accumulate": [False, True]})
def test_equals_the_definition(shape: tuple[int, int], num_rows: int, accumulate: bool) -> None:
    generator = rng()
    num_columns, depth = shape
    w, x = normal(generator, num_columns, depth), normal(generator, num_rows, depth)
    packed = cpu.pack(w)
    out = np.full((num_rows, len(packed) * cpu.PANEL), np.nan, np.float32)
    start = normal(generator, num_rows, num_columns)
    if accumulate:
        out[:, :num_columns] = start
    ThreadTeam(2).run(cpu.matmul, 1, x, packed, out, accumulate)
    expected = reference.matmul(x, w, start if accumulate else None)
    assert relative_error(out[:, :num_columns], expected, start) < TOLERANCE["float32"]


@pytest.mark.parametrize("shape", [(48, 100), (192, 576), (80, 1536)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(shape: tuple[int, int]) -> None:
    generator = rng()
    num_columns, depth = shape
    packed = cpu.pack(normal(generator, num_columns, depth))
    row = normal(generator, depth)
    alone = np.empty((1, num_columns), np.float32)
    ThreadTeam(1).run(cpu.matmul, 1, row[None], packed, alone, False)
    for num_rows in [*range(2, 40), 64, 129, 300]:
        x = normal(generator, num_rows, depth) * 100
        at = int(generator.integers(num_rows))
        x[at] = row
        out = np.full((num_rows, num_columns), np.nan, np.float32)
        ThreadTeam(int(generator.integers(1, 9))).run(cpu.matmul, 1, x, packed, out, False)
        assert np.array_equal(out[at], alone[0]), (num_rows, at)


def test_reads_and_writes_only_its_own_rows_of_wider_arrays() -> None:
    generator = rng()
    wide_x, wide_out = normal(generator, 9, 70), np.full((9, 64), 7.0, np.float32)
    w = normal(generator, 32, 48)
    ThreadTeam(2).run(cpu.matmul, 1, wide_x[2:7, :48], cpu.pack(w), wide_out[2:7, :32], False)
    assert relative_error(wide_out[2:7, :32], reference.matmul(wide_x[2:7, :48], w)) < TOLERANCE["float32"]
    assert (wide_out[:2] == 7.0).all()
    assert (wide_out[7:] == 7.0).all()
    assert (wide_out[:, 32:] == 7.0).all()


TENSOR_FORMS = {"torch": plain.linear, "triton": triton.linear}


@pairwise(
    {
        "form": TENSOR_FORMS,
        "num_rows, width, depth": [(0, 8, 8), (1, 1, 1), (3, 100, 70), (70, 130, 200)],
        "accumulate": [False, True],
        "dtype": DTYPES,
    }
)
def test_tensors_equal_the_definition(
    form: str, num_rows: int, width: int, depth: int, accumulate: bool, dtype: torch.dtype
) -> None:
    generator = rng()
    x, weight = tensor(normal(generator, num_rows, depth), dtype), tensor(normal(generator, width, depth), dtype)
    bias = tensor(normal(generator, width), dtype) if generator.integers(2) else None
    memory, out = poisoned(num_rows, width, dtype if generator.integers(2) else torch.float32)
    parts = [reference.matmul(numpy(x), numpy(weight))]
    if bias is not None:
        parts.append(np.broadcast_to(numpy(bias), parts[0].shape))
    if accumulate:
        out.copy_(tensor(normal(generator, num_rows, width)))
        parts.append(numpy(out))
    TENSOR_FORMS[form](x, weight, out, bias, accumulate=accumulate)
    assert error(out, np.sum(parts, axis=0), *parts) < tensors.TOLERANCE[dtype]
    assert_poison_left(memory, num_rows, width)


@pytest.mark.usefixtures("rows_of_products_alike")
@pytest.mark.parametrize("form", TENSOR_FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_tensors_has_the_same_bits_in_any_batch(form: str, dtype: torch.dtype) -> None:
    generator, linear = rng(), TENSOR_FORMS[form]
    weight, x = tensor(normal(generator, 70, 130), dtype), tensor(normal(generator, 90, 130), dtype)
    whole, alone = torch.empty(90, 70, dtype=dtype, device=DEVICE), torch.empty(1, 70, dtype=dtype, device=DEVICE)
    linear(x, weight, whole)
    for row in generator.integers(0, 90, 6).tolist():
        linear(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], whole[row])


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, out = tensor(np.zeros((2, 8), np.float32)), tensor(np.zeros((5, 8), np.float32)), torch.zeros(2, 5)
    for wrong in ((x[:, 1:], weight, out), (x, weight, out[:, 1:]), (x, weight, out[1:]), (x.half(), weight, out)):
        with pytest.raises(ValueError, match="product operands do not fit"):
            triton.linear(*wrong)
