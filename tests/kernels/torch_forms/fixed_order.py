"""Sums and exponentials of plain torch that have the same bits on every machine, for any number of rows.

In: tensors. Out: sums over one dimension in one fixed order, products made of them, and exponentials. Only additions,
multiplications and conversions of single elements are used, and IEEE 754 rounds each of them in one way: whatever
vectors a processor has, wherever a thread's part of an array ends, no element can see the others. A library's
product or reduction is never asked: it chooses the order of its sums by processor, shape, alignment and threads.
This is for tests on machines without a GPU. It is there to be right, not fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Terms that exist at once while products are added up (1 MiB of float32: they stay in a core's cache).
MOST_TERMS = 1 << 18

#: ln 2 in two parts, so that n * _LN2_HIGH is exact for every exponent n (Cody & Waite 1980).
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
#: Beyond it float32 knows only 0 and infinity.
_LARGEST_EXPONENT = 700.0
#: 1 / n!, the largest n first: the remainder of the series is below 1e-15 for |x| <= ln 2 / 2.
_INVERSE_FACTORIALS = (
    1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720, 1 / 120,
    1 / 24, 1 / 6, 1 / 2, 1.0, 1.0,
)  # fmt: skip


def folded_sum(terms: Tensor) -> Tensor:
    """The sum over the first dimension: terms [n, ...] -> [...]. `terms` is overwritten.

    The upper half is added to the lower one until one is left; halves are powers of two, so zeros behind the last term
    change nothing. A sum is never -0.0.
    """
    count = len(terms)
    if not count:
        return terms.new_zeros(terms.shape[1:])
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0] + 0.0


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, d_in] @ weight.T -> [T, d_out], sums in the order of `folded_sum`; weight [d_out, d_in] is of x's type."""
    (num_rows, depth), width = x.shape, len(weight)
    out = x.new_empty(num_rows, width)
    columns_at_once = max(1, min(width, MOST_TERMS // max(depth, 1)))
    rows_at_once = max(1, MOST_TERMS // max(depth * columns_at_once, 1))
    x_by_depth, weight_by_depth = x.T.contiguous(), weight.T.contiguous()
    for column in range(0, width, columns_at_once):
        columns = weight_by_depth[:, None, column : column + columns_at_once]  # [d_in, 1, columns]
        for row in range(0, num_rows, rows_at_once):
            terms = x_by_depth[:, row : row + rows_at_once, None] * columns  # [d_in, rows, columns]
            out[row : row + rows_at_once, column : column + columns_at_once] = folded_sum(terms)
    return out


def exponential(x: Tensor) -> Tensor:
    """exp(x) as float64, within 1e-14 of its value; above 700 and below -700 that of 700 and -700. NaN stays NaN."""
    bounded = x.double().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    exponent = (bounded * _LOG2_E).round()
    rest = bounded - exponent * _LN2_HIGH - exponent * _LN2_LOW  # at most ln 2 / 2
    series = torch.full_like(rest, _INVERSE_FACTORIALS[0])
    for coefficient in _INVERSE_FACTORIALS[1:]:
        series = series * rest + coefficient
    power = ((exponent.nan_to_num().long() + 1023) << 52).view(torch.float64)  # 2 ** exponent, written as bits
    return series * power
