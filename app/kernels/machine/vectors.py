"""Vector arithmetic for the LLVM emitters that Numba's own loops do not reach: values of `LANES` float32.

Everything works lane by lane, or joins lanes in one fixed order, so a value's place never changes its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

#: float32 lanes of one vector; LLVM splits vectors that are wider than the machine's.
LANES = 8

WORD, INT, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR, INTS, BITS = (ir.VectorType(kind, LANES) for kind in (FLOAT, INT, ir.IntType(1)))

#: Range reduction and polynomial of e**x, the highest power first: Cephes expf (Moshier 1989).
LOG2E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
EXP_MIN = np.float32(-87.3)
EXP_MAX = np.float32(88.0)
EXP_TERMS = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)


def place(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """Pointer to a `kind` at element `index` (float32s) behind address `base`."""
    return builder.inttoptr(builder.add(base, builder.shl(index, WORD(2))), kind.as_pointer())


def load(builder: Any, base: Any, index: Any) -> Any:
    """LANES floats, aligned as floats are."""
    return builder.load(place(builder, base, index, VECTOR), align=4)


def load_bf16(builder: Any, address: Any, kind: Any = VECTOR) -> Any:
    """bfloat16 values at `address` as float32, a vector of `kind`: bfloat16 bits are the upper halves of float32's."""
    small, wide = (ir.VectorType(bits, kind.count) for bits in (ir.IntType(16), INT))
    values = builder.load(builder.inttoptr(address, small.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(values, wide), ir.Constant(wide, [16] * kind.count)), kind)


def store(builder: Any, value: Any, base: Any, index: Any) -> None:
    """LANES floats, aligned as floats are."""
    builder.store(value, place(builder, base, index, VECTOR), align=4)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line of `address`, which may be invalid: it is read soon, once."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [builder.inttoptr(address, ir.IntType(8).as_pointer()), INT(0), INT(3), INT(1)])


def constant(value: float | np.float32) -> Any:
    """One number in every lane."""
    return ir.Constant(VECTOR, [float(value)] * LANES)


def spread(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    """One value in every lane of a vector of `kind`."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; float32 vectors of one length."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


def exp(builder: Any, x: Any) -> Any:
    """e**x within 2 ulp, every lane; below -87.3 about 1e-38. NaN gives that too."""
    kind = ir.FunctionType(VECTOR, [VECTOR])
    floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
    low, high = constant(EXP_MIN), constant(EXP_MAX)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    n = builder.call(floor, [fma(builder, x, constant(LOG2E), constant(0.5))])
    r = fma(builder, n, constant(-LN2_HIGH), x)
    r = fma(builder, n, constant(-LN2_LOW), r)
    p = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p = fma(builder, p, r, constant(term))
    p = builder.fadd(fma(builder, builder.fmul(p, r), r, r), constant(1.0))
    exponent = builder.add(builder.fptosi(n, INTS), ir.Constant(INTS, [127] * LANES))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), VECTOR))


def greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def plus(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def tree(builder: Any, values: list[Any], join: Callable[[Any, Any, Any], Any]) -> Any:
    """Join a power of two of vectors: neighbours first, then pairs of neighbours."""
    while len(values) > 1:
        values = [join(builder, values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def across(builder: Any, value: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Join all lanes into one float, halves first."""
    half = LANES // 2
    while half:
        order = [(lane + half) % LANES for lane in range(LANES)]
        value = join(builder, value, builder.shuffle_vector(value, value, ir.Constant(INTS, order)))
        half //= 2
    return builder.extract_element(value, INT(0))
