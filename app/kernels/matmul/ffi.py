"""Products with packed weights on the CPU inside XLA programs.

In: rows and the packed weights of all layers, in float32 or in 8 bits. Out: the product with one layer's weights. Only
the first `num_rows` rows are read and written: what the others hold is not defined.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised, layer_panels, multiply
from app.kernels.xla_call import Bytes4, Floats2, Floats4, KernelCall, Number, reader, team_of


class _Operands(NamedTuple):
    layer: Number
    num_rows: Number
    x: Floats2
    w: Floats4


class _QuantisedOperands(NamedTuple):
    layer: Number
    num_rows: Number
    x: Floats2
    levels: Bytes4
    scales: Floats4
    offsets: Floats4


class _Results(NamedTuple):
    out: Floats2


_operands, _results = reader(_Operands), reader(_Results, after=_Operands)
_quantised_operands, _quantised_results = reader(_QuantisedOperands), reader(_Results, after=_QuantisedOperands)


def _multiply(record: int) -> None:
    given, found = _operands(record), _results(record)
    n = given.num_rows
    multiply(team_of(record), 0, given.x[:n], layer_panels(given.w, given.layer), found.out[:n])


def _multiply_quantised(record: int) -> None:
    given, found = _quantised_operands(record), _quantised_results(record)
    n, w = given.num_rows, Quantised(given.levels, given.scales, given.offsets)
    multiply(team_of(record), 0, given.x[:n], layer_panels(w, given.layer), found.out[:n])


_call = KernelCall("multiply", _Operands, _Results, _multiply, {})
_quantised_call = KernelCall("multiply_quantised", _QuantisedOperands, _Results, _multiply_quantised, {})


def product(x: Array, w: Array | Quantised, layer: Array, num_rows: Array) -> Array:
    """x [T, K] @ w -> [T, P * 16]. w: of all layers [L, P, K, 16], or the same in 8 bits; layer, num_rows: int32."""
    num_columns = PANEL * (w.levels if isinstance(w, Quantised) else w).shape[1]
    shapes = ((len(x), num_columns),)
    if isinstance(w, Quantised):
        out: Array = _quantised_call(_QuantisedOperands(layer, num_rows, x, *map(jnp.asarray, w)), shapes).out
    else:
        out = _call(_Operands(layer, num_rows, x, w), shapes).out
    return out
