"""One step of the online softmax as a Numba intrinsic: a row's scores for a group of keys become probabilities.

Maximum and sum are taken over all `KEYS` lanes in one fixed order, and lanes that the row does not see count as minus
infinity and as zero, so the bits depend only on the row's own visible scores and their places in the group.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.vectors import (
    BITS,
    FLOAT,
    INT,
    INTS,
    LANES,
    WORD,
    across,
    constant,
    exp,
    greater,
    load,
    place,
    plus,
    spread,
    store,
    tree,
)

#: Keys of one step.
KEYS = 64


@intrinsic
def softmax_step(
    typingctx: Any, scores: Any, low: Any, high: Any, maximum: Any, total: Any, acc: Any, width: Any
) -> Any:
    """Fold scores[low:high] of a row into its running maximum, sum and accumulator (Milakov & Gimelshein 2018).

    `scores` is the address of KEYS float32, on return probabilities, zero outside of low to high (low < high); their
    previous contents there, NaN or not, are ignored. `maximum`, `total`: addresses of one float32; `acc`: of `width`, a
    multiple of LANES. A row begins with minus infinity, 0 and zeros. A visible score that is NaN or infinity makes the
    sum NaN: `exp` alone would hide that a product overflowed, and all keys would count the same.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _emit(builder, *args)
        return context.get_dummy_value()

    return types.void(*([types.intp] * 7)), codegen


def _emit(builder: Any, scores: Any, low: Any, high: Any, maximum: Any, total: Any, acc: Any, width: Any) -> None:
    starts = [WORD(i) for i in range(0, KEYS, LANES)]
    first, end = (spread(builder, builder.trunc(bound, INT), INTS) for bound in (low, high))
    seen, values = [], []
    for start in starts:
        lanes = ir.Constant(INTS, [start.constant + lane for lane in range(LANES)])
        inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        seen.append(inside)
        values.append(builder.select(inside, load(builder, scores, start), constant(float("-inf"))))
    maximum, total = place(builder, maximum, WORD(0), FLOAT), place(builder, total, WORD(0), FLOAT)
    old = builder.load(maximum)
    top = across(builder, tree(builder, values, greater), greater)
    grown = builder.fcmp_ordered(">", top, old)
    with builder.if_then(grown):
        builder.store(top, maximum)
        begins = spread(builder, builder.fcmp_ordered("==", old, FLOAT(float("-inf"))), BITS)
        shrinkage = exp(builder, spread(builder, builder.fsub(old, top)))
        shrinkage = builder.select(begins, constant(0.0), shrinkage)
        builder.store(builder.fmul(builder.load(total), builder.extract_element(shrinkage, INT(0))), total)
        with cgutils.for_range(builder, builder.udiv(width, WORD(LANES)), intp=WORD) as loop:
            at = builder.mul(loop.index, WORD(LANES))
            store(builder, builder.fmul(load(builder, acc, at), shrinkage), acc, at)
    tops = spread(builder, builder.select(grown, top, old))
    chances = []
    for value, inside, start in zip(values, seen, starts, strict=True):
        distance = builder.fsub(value, tops)
        is_nan = builder.fcmp_unordered("uno", distance, distance)
        chance = builder.select(is_nan, distance, exp(builder, distance))
        chance = builder.select(inside, chance, constant(0.0))
        store(builder, chance, scores, start)
        chances.append(chance)
    added = across(builder, tree(builder, chances, plus), plus)
    builder.store(builder.fadd(builder.load(total), added), total)
