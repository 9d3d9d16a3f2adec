"""Whole linear modules on the CPU inside XLA programs: one custom call each, adapters and all.

In: rows, packed weights of all layers, and what a step's adapters are (`Adapted`). Out: the first `num_rows` rows; what
the others hold is not defined. A call is a norm, where one comes first, a shrink, and one pass over the columns
(`cpu`); the embedding and the logits are calls like these. So a layer is four calls and its attention, and a row has
the torch engine's bits. What happens in a call: `_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from app.kernels.linear import calls
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised
from app.kernels.sgmv import cpu as sgmv_cpu

#: Packed weights of all layers [L, P, d_in, 16] in float32, or the same in 8 bits.
Packed = Array | Quantised


class Adapted(NamedTuple):
    """Adapters of a step. M modules of a layer: q, k, v, o, gate, up, down; S adapter slots; int32 but for the rows.

    a: per module panels [L, R / 8, d_in, 8], b: [L, R, W], float32; starts: [S]; in_bf16: [S] bool: see
    `app.kernels.sgmv.cpu`. ranks: [L, S, M]. extras: `packed_tables`. runs [G, 3], of which num_runs, and tasks
    [J, 3], of which num_tasks: as `project` and `shrink` take them. widest: the largest rank in the batch. extra_runs
    [E, 3], of which num_extra_runs: runs whose adapters have extras; extra_samples, num_extra_samples: the same over
    sampled rows. slots: [T], the adapter slots of those runs' tokens. head_inputs: [3], the scratch of
    `own_head_inputs`: its address in two halves, its width.
    """

    a: tuple[Array, ...]
    b: tuple[Array, ...]
    starts: Array
    in_bf16: Array
    ranks: Array
    extras: Array
    runs: Array
    num_runs: Array
    tasks: Array
    num_tasks: Array
    widest: Array
    extra_runs: Array
    num_extra_runs: Array
    extra_samples: Array
    num_extra_samples: Array
    slots: Array
    head_inputs: Array


#: Tokens of one task of a shrink.
TASK_TOKENS = sgmv_cpu._CHUNK
#: Places of the modules.
_QKV, O_PROJ, _GATE, DOWN_PROJ = (0, 1, 2), 3, (4, 5), 6
#: By the first module of a call, those whose a it asks memory for, three of them: what is read next. o is the smallest
#: product and gate and up the largest shrink, so that of gate is asked for before o.
_NEXT = {0: (3, 4, 4), 3: (5, 5, 5), 4: (6, 6, 6), 6: (0, 1, 2)}
#: Place of `other` among the operands of a linear module.
_HIDDEN = 6


def embed(
    token_ids: Array, embedding: Array | None, head: Packed, adapted: Adapted, num_rows: Array, hidden_size: int
) -> Array:
    """[T, H rounded up to 16]. embedding: [V, H], or None to read the columns of `head` [1, P, H, 16]."""
    has_embedding = embedding is not None
    scalars = _scalars(num_rows, adapted.num_extra_runs, has_embedding)
    given = jnp.zeros((1, 1), jnp.float32) if embedding is None else embedding
    target = _target(head, calls.embed, calls.embed_quantised)
    out: Array = jax.ffi.ffi_call(target, _floats(len(token_ids), _padded(hidden_size)))(
        scalars, token_ids, *_buffers(head), given, adapted.ranks, adapted.extras, adapted.slots
    )
    return out


def norm_qkv(
    hidden: Array, norm: Array, w: Packed, bias: Array | None, layer: Array, eps: float, num_rows: Array,
    adapted: Adapted,
) -> Array:  # fmt: skip
    """[T, P * 16]: q, k and v of the normed rows, each padded to whole panels. hidden: [T, >= H]; norm: [L, H];
    w: [L, P, H, 16]; bias: [L, P * 16]."""
    results = _floats(len(hidden), _width(w)), *_scratch(hidden, norm, adapted, _QKV)
    target = _target(w, calls.norm_qkv, calls.norm_qkv_quantised)
    out: Array = jax.ffi.ffi_call(target, results)(
        *_operands(hidden, w, bias, norm, layer, num_rows, adapted, _QKV, eps)
    )[0]
    return out


def norm_gated(
    hidden: Array, norm: Array, w: Packed, bias: Array | None, layer: Array, eps: float, num_rows: Array,
    adapted: Adapted, mlp_size: int, gelu: bool,
) -> Array:  # fmt: skip
    """[T, mlp_size]: act(gate) * up of the normed rows; w holds the panels of gate, then those of up."""
    tokens = len(hidden)
    results = _floats(tokens, mlp_size), *_scratch(hidden, norm, adapted, _GATE), _floats(tokens, _width(w))
    target = _target(w, calls.norm_gated, calls.norm_gated_quantised)
    out: Array = jax.ffi.ffi_call(target, results)(
        *_operands(hidden, w, bias, norm, layer, num_rows, adapted, _GATE, eps, gelu)
    )[0]
    return out


def add_product(
    hidden: Array, x: Array, w: Packed, bias: Array | None, layer: Array, num_rows: Array, adapted: Adapted, module: int
) -> Array:  # fmt: skip
    """hidden [T, P * 16] + x [T, d_in] @ w + bias, in the memory of hidden. module: O_PROJ or DOWN_PROJ."""
    shrunk = _floats(len(x), 1, _rank_rows(adapted))
    results = jax.ShapeDtypeStruct(hidden.shape, jnp.float32), shrunk, _floats(*hidden.shape)
    operands = _operands(x, w, bias, hidden, layer, num_rows, adapted, (module,), 0.0)
    target = _target(w, calls.add_product, calls.add_product_quantised)
    call = jax.ffi.ffi_call(target, results, input_output_aliases={_HIDDEN: 0})
    out: Array = call(*operands)[0]
    return out


def logits(
    hidden: Array, sample_rows: Array, norm: Array, head: Packed, eps: float, num_samples: Array, adapted: Adapted
) -> Array:
    """[B, P * 16] of the rows sample_rows [B]. norm: [H]; head: [1, P, H, 16]."""
    counts = num_samples, adapted.num_extra_runs, adapted.num_extra_samples
    scalars = _scalars(*counts, _bits(eps), *(adapted.head_inputs[i] for i in range(3)))
    count = len(sample_rows)
    results = _floats(count, _width(head)), _floats(count, len(norm))
    out: Array = jax.ffi.ffi_call(_target(head, calls.logits, calls.logits_quantised), results)(
        scalars, hidden, *_buffers(head), sample_rows, norm, adapted.ranks, adapted.extras, adapted.extra_samples,
        adapted.slots,
    )[0]  # fmt: skip
    return out


def _target(w: Packed, wide: Callable[[int], None], quantised: Callable[[int], None]) -> str:
    return calls.target(quantised if isinstance(w, Quantised) else wide)[0]


def _buffers(w: Packed) -> tuple[Array, ...]:
    """Three, whatever w is."""
    none = jnp.zeros((1, 0), jnp.float32)
    return tuple(map(jnp.asarray, w)) if isinstance(w, Quantised) else (w, none, none)


def _width(w: Packed) -> int:
    return (w.levels if isinstance(w, Quantised) else w).shape[1] * PANEL


def _padded(width: int) -> int:
    return -(-width // PANEL) * PANEL


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def _scalars(*values: Array | int | bool) -> Array:
    return jnp.stack([jnp.int32(value) for value in values])


def _bits(value: float) -> Array:
    """A float32 as the int32 with the same bits: scalars of a call are integers."""
    return lax.bitcast_convert_type(jnp.float32(value), jnp.int32)


def _rank_rows(adapted: Adapted) -> int:
    """Width of a shrink's result: any adapter's."""
    return max(adapted.b[0].shape[1], 8)


def _scratch(
    hidden: Array, norm: Array, adapted: Adapted, modules: tuple[int, ...]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Normed rows, and what the shrink leaves."""
    return _floats(len(hidden), norm.shape[1]), _floats(len(hidden), len(modules), _rank_rows(adapted))


def _operands(
    x: Array, w: Packed, bias: Array | None, other: Array, layer: Array, num_rows: Array, adapted: Adapted,
    modules: tuple[int, ...], eps: float, gelu: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """The scalars and buffers of a linear module, in the order that `_calls` reads them."""
    counts = num_rows, adapted.num_runs, adapted.num_tasks, adapted.widest, adapted.num_extra_runs
    return (
        _scalars(layer, *counts, modules[0], _bits(eps), gelu), x, *_buffers(w),
        jnp.zeros((1, 0), jnp.float32) if bias is None else bias, other, adapted.starts, adapted.in_bf16,
        adapted.ranks, adapted.runs, adapted.tasks, adapted.extras, adapted.extra_runs, adapted.slots,
        *(adapted.a[n] for n in modules), *(adapted.b[n] for n in modules), *(adapted.a[n] for n in _NEXT[modules[0]]),
    )  # fmt: skip
