"""Whole linear modules on the CPU inside XLA programs: one custom call each, adapters and all.

In: rows, packed weights of all layers, and what a step's adapters are (`Adapted`). Out: the first `num_rows` rows; what
the others hold is not defined. A call is a norm, where one comes first, a shrink, and one pass over the columns
(`_cpu`); the embedding and the logits are calls like these. So a layer is four calls and its attention, and a row has
the torch engine's bits. Nothing but a call's scalars and sizes decides how many pieces there are: see `xla_call`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from app.kernels.compiled import compiled
from app.kernels.extras._cpu import (
    ATTENTION_NORM,
    MLP_NORM,
    own_embedding,
    own_gather_normed,
    own_head,
    own_head_inputs,
    own_rms_norm,
)  # fmt: skip
from app.kernels.extras._ffi import tables_of
from app.kernels.linear._cpu import Own, gate_and_up, project
from app.kernels.matmul._cpu import PANEL
from app.kernels.matmul._quantised import embed as embed_rows
from app.kernels.rows._cpu import _float_from_bits, gather_normed, rms_norm
from app.kernels.sgmv import _cpu as sgmv_cpu
from app.kernels.sgmv._cpu import RowPlaces, shrink
from app.kernels.xla_call import args_of, bools, buffer, floats, ints, leave_record, register, size, task, team_of


class Adapted(NamedTuple):
    """Adapters of a step. M modules of a layer: q, k, v, o, gate, up, down; S adapter slots; int32 but for the rows.

    a: per module panels [L, R / 8, d_in, 8], b: [L, P, R, 16], float32; starts: [S]; in_bf16: [S] bool: see
    `app.kernels.sgmv._cpu`. ranks: [L, S, M]. extras: `packed_tables`. runs [G, 3], of which num_runs, and tasks
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


def embed(
    token_ids: Array, embedding: Array | None, head: Array, adapted: Adapted, num_rows: Array, hidden_size: int
) -> Array:
    """[T, H rounded up to 16]. embedding: [V, H], or None to read the columns of `head` [1, P, H, 16]."""
    has_embedding = embedding is not None
    scalars = _scalars(num_rows, adapted.num_extra_runs, has_embedding)
    operands = jnp.zeros((1, 1), jnp.float32) if embedding is None else embedding, head
    width = _padded(hidden_size)
    out: Array = jax.ffi.ffi_call(_embed_target()[0], _floats(len(token_ids), width))(
        scalars, token_ids, *operands, adapted.ranks, adapted.extras, adapted.slots
    )
    return out


def norm_qkv(
    hidden: Array, norm: Array, w: Array, bias: Array | None, layer: Array, eps: float, num_rows: Array,
    adapted: Adapted,
) -> Array:  # fmt: skip
    """[T, P * 16]: q, k and v of the normed rows, each padded to whole panels. hidden: [T, >= H]; norm: [L, H];
    w: [L, P, H, 16]; bias: [L, P * 16]."""
    results = _floats(len(hidden), w.shape[1] * PANEL), *_scratch(hidden, norm, adapted, _QKV)
    out: Array = jax.ffi.ffi_call(_qkv_target()[0], results)(
        *_operands(hidden, w, bias, norm, layer, num_rows, adapted, _QKV, eps)
    )[0]
    return out


def norm_gated(
    hidden: Array, norm: Array, w: Array, bias: Array | None, layer: Array, eps: float, num_rows: Array,
    adapted: Adapted, mlp_size: int, gelu: bool,
) -> Array:  # fmt: skip
    """[T, mlp_size]: act(gate) * up of the normed rows; w holds the panels of gate, then those of up."""
    tokens = len(hidden)
    wide = _floats(tokens, w.shape[1] * PANEL)
    results = _floats(tokens, mlp_size), *_scratch(hidden, norm, adapted, _GATE), wide
    out: Array = jax.ffi.ffi_call(_gated_target()[0], results)(
        *_operands(hidden, w, bias, norm, layer, num_rows, adapted, _GATE, eps, gelu)
    )[0]
    return out


def add_product(
    hidden: Array, x: Array, w: Array, bias: Array | None, layer: Array, num_rows: Array, adapted: Adapted, module: int
) -> Array:  # fmt: skip
    """hidden [T, P * 16] + x [T, d_in] @ w + bias, in the memory of hidden. module: O_PROJ or DOWN_PROJ."""
    shrunk = _floats(len(x), 1, _rank_rows(adapted))
    results = jax.ShapeDtypeStruct(hidden.shape, jnp.float32), shrunk, _floats(*hidden.shape)
    call = jax.ffi.ffi_call(_add_target()[0], results, input_output_aliases={4: 0})
    out: Array = call(*_operands(x, w, bias, hidden, layer, num_rows, adapted, (module,), 0.0))[0]
    return out


def logits(
    hidden: Array, sample_rows: Array, norm: Array, head: Array, eps: float, num_samples: Array, adapted: Adapted
) -> Array:
    """[B, P * 16] of the rows sample_rows [B]. norm: [H]; head: [1, P, H, 16]."""
    counts = num_samples, adapted.num_extra_runs, adapted.num_extra_samples
    scalars = _scalars(*counts, _bits(eps), *(adapted.head_inputs[i] for i in range(3)))
    count = len(sample_rows)
    results = _floats(count, head.shape[1] * PANEL), _floats(count, len(norm))
    out: Array = jax.ffi.ffi_call(_logits_target()[0], results)(
        scalars, hidden, sample_rows, norm, head, adapted.ranks, adapted.extras, adapted.extra_samples, adapted.slots
    )[0]
    return out


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
    return max(adapted.b[0].shape[2], 8)


def _scratch(
    hidden: Array, norm: Array, adapted: Adapted, modules: tuple[int, ...]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Normed rows, and what the shrink leaves."""
    return _floats(len(hidden), norm.shape[1]), _floats(len(hidden), len(modules), _rank_rows(adapted))


def _operands(
    x: Array, w: Array, bias: Array | None, other: Array, layer: Array, num_rows: Array, adapted: Adapted,
    modules: tuple[int, ...], eps: float, gelu: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """The scalars and buffers of a linear module, in the order that `_linear` reads them."""
    counts = num_rows, adapted.num_runs, adapted.num_tasks, adapted.widest, adapted.num_extra_runs
    return (
        _scalars(layer, *counts, modules[0], _bits(eps), gelu), x, w,
        jnp.zeros((1, 0), jnp.float32) if bias is None else bias, other, adapted.starts, adapted.in_bf16,
        adapted.ranks, adapted.runs, adapted.tasks, adapted.extras, adapted.extra_runs, adapted.slots,
        *(adapted.a[n] for n in modules), *(adapted.b[n] for n in modules),
    )  # fmt: skip


# -- in the kernels: scalars and buffers back into arrays -----------------------------------------

_LAYER, _NUM_ROWS, _NUM_RUNS, _NUM_TASKS, _WIDEST, _NUM_EXTRA, _MODULE, _EPS, _GELU = range(9)
_X, _W, _BIAS, _OTHER, _STARTS, _IN_BF16, _RANKS, _RUNS, _TASKS, _EXTRAS, _EXTRA_RUNS, _SLOTS, _TABLES = range(13)


@compiled
def _matrix(args, b, num_rows):
    """The first rows of buffer b."""
    return floats(buffer(args, b), (num_rows, size(args, b, 1)))


@compiled
def _vector_of(args, b, layer):
    """A layer's row of buffer b [L, N]."""
    return floats(buffer(args, b) + layer * size(args, b, 1) * 4, (size(args, b, 1),))


@compiled
def _panels_of(args, b, layer):
    """A layer's panels of buffer b [L, ., ., .]."""
    shape = (size(args, b, 1), size(args, b, 2), size(args, b, 3))
    return floats(buffer(args, b) + layer * shape[0] * shape[1] * shape[2] * 4, shape)


@compiled
def _cube(args, b, num_rows):
    return floats(buffer(args, b), (num_rows, size(args, b, 1), size(args, b, 2)))


@compiled
def _runs_of(args, b, count):
    return ints(buffer(args, b), (count, 3))


@compiled
def _indices_of(args, b):
    return ints(buffer(args, b), (size(args, b, 0),))


@compiled
def _places_of(args):
    shape = (size(args, _STARTS, 0),)
    return RowPlaces(ints(buffer(args, _STARTS), shape), bools(buffer(args, _IN_BF16), shape))


@compiled
def _ranks_of(args, b, layer):
    """A layer's ranks [S, M]."""
    num_slots, modules = size(args, b, 1), size(args, b, 2)
    return ints(buffer(args, b) + layer * num_slots * modules * 4, (num_slots, modules))


@compiled
def _extras_of(args, b, ranks):
    return tables_of(buffer(args, b), size(args, ranks, 0), size(args, ranks, 1))


@compiled
def _normed(team, args, norm, normed):
    """Phase 0: the rows of x, each with its adapter's own norm if it has one."""
    x, weight, eps = (
        _matrix(args, _X, args[_NUM_ROWS]),
        _vector_of(args, _OTHER, args[_LAYER]),
        _float_from_bits(args[_EPS]),
    )
    if args[_NUM_EXTRA] > 0:
        own = _extras_of(args, _EXTRAS, _RANKS).norms[args[_LAYER], :, norm]
        own_rms_norm(team, 0, x, weight, eps, own, _indices_of(args, _SLOTS), normed)
    else:
        rms_norm(team, 0, x, weight, eps, normed)


@compiled
def _own(args, kept):
    extra_runs = _runs_of(args, _EXTRA_RUNS, args[_NUM_EXTRA])
    return Own(_extras_of(args, _EXTRAS, _RANKS), args[_LAYER], args[_MODULE], extra_runs, kept)


@compiled
def _run_qkv(team, args):
    """Results: qkv; scratch: normed, shrunk."""
    layer, num_rows, result = args[_LAYER], args[_NUM_ROWS], _TABLES + 6
    normed, h = _matrix(args, result + 1, num_rows), _cube(args, result + 2, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, 0:3]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    _normed(team, args, ATTENTION_NORM, normed)
    if runs.shape[0] > 0:
        a = _panels_of(args, _TABLES, layer), _panels_of(args, _TABLES + 1, layer), _panels_of(args, _TABLES + 2, layer)
        shrink(team, 1, normed, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    b = _panels_of(args, _TABLES + 3, layer), _panels_of(args, _TABLES + 4, layer), _panels_of(args, _TABLES + 5, layer)
    project(
        team, 2, normed, _panels_of(args, _W, layer), _vector_of(args, _BIAS, layer), False, h, b, ranks, runs,
        places, _own(args, normed), _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_gated(team, args):
    """Results: gated; scratch: normed, shrunk, gate and up."""
    layer, num_rows, result = args[_LAYER], args[_NUM_ROWS], _TABLES + 4
    normed, h = _matrix(args, result + 1, num_rows), _cube(args, result + 2, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, 4:6]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    _normed(team, args, MLP_NORM, normed)
    if runs.shape[0] > 0:
        a = _panels_of(args, _TABLES, layer), _panels_of(args, _TABLES + 1, layer)
        shrink(team, 1, normed, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    b = _panels_of(args, _TABLES + 2, layer), _panels_of(args, _TABLES + 3, layer)
    gate_and_up(
        team, 2, normed, _panels_of(args, _W, layer), _vector_of(args, _BIAS, layer), h, b, ranks, runs, places,
        _own(args, normed), args[_GELU] != 0, _matrix(args, result + 3, num_rows), _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_add(team, args):
    """Results: the sum, where `other` was; scratch: shrunk, kept."""
    layer, num_rows, module, result = args[_LAYER], args[_NUM_ROWS], args[_MODULE], _TABLES + 2
    x, h = _matrix(args, _X, num_rows), _cube(args, result + 1, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, module : module + 1]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    if runs.shape[0] > 0:
        a = (_panels_of(args, _TABLES, layer),)
        shrink(team, 0, x, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    project(
        team, 1, x, _panels_of(args, _W, layer), _vector_of(args, _BIAS, layer), True, h,
        (_panels_of(args, _TABLES + 1, layer),), ranks, runs, places,
        _own(args, _matrix(args, result + 2, num_rows)), _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_embed(team, args):
    """scalars: rows, runs with extras, has an embedding. Buffers: token ids, embedding, head, ranks, extras, slots,
    out."""
    token_ids, hidden_size = ints(buffer(args, 0), (args[0],)), size(args, 2, 2)
    embedding = floats(buffer(args, 1), (size(args, 1, 0) if args[2] else 0, hidden_size))
    head = floats(buffer(args, 2), (1, size(args, 2, 1), hidden_size, PANEL))
    out = _matrix(args, 6, args[0])[:, :hidden_size]
    embed_rows(team, 0, token_ids, embedding, head, out)
    if args[1] > 0:
        own_embedding(team, 1, token_ids, _extras_of(args, 4, 3), _indices_of(args, 5), out)


@compiled
def _run_logits(team, args):
    """scalars: sampled rows, runs with extras, those that sample, eps, scratch's address and width. Buffers: hidden,
    sampled rows, norm, head, ranks, extras, runs that sample, slots; results: logits, normed rows."""
    num_rows, eps = args[0], _float_from_bits(args[3])
    hidden, rows = _matrix(args, 0, size(args, 0, 0)), ints(buffer(args, 1), (num_rows,))
    norm, sampled = floats(buffer(args, 2), (size(args, 2, 0),)), _matrix(args, 9, num_rows)
    runs, tables = _runs_of(args, 6, args[2]), _extras_of(args, 5, 4)
    address = (args[4] & np.int64(0xFFFFFFFF)) | (args[5] << 32)
    inputs = floats(address, (num_rows, args[6]))
    if args[1] > 0:
        own_gather_normed(team, 0, hidden, rows, norm, eps, tables.final_norm, _indices_of(args, 7), sampled)
        own_head_inputs(team, 1, sampled, tables, runs, inputs)
    else:
        gather_normed(team, 0, hidden, rows, norm, eps, sampled)
    own_head(team, 2, sampled, _panels_of(args, 3, 0), tables, runs, inputs, _matrix(args, 8, num_rows))


@cache
def _embed_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _run_embed(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_embed", register("polylora_embed", run)


@cache
def _qkv_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _run_qkv(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_norm_qkv", register("polylora_norm_qkv", run)


@cache
def _gated_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _run_gated(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_norm_gated", register("polylora_norm_gated", run)


@cache
def _add_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _run_add(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_add_product", register("polylora_add_product", run)


@cache
def _logits_target() -> tuple[str, Any]:
    @task
    def run(record: int) -> None:
        _run_logits(team_of(record), args_of(record))
        leave_record(record)

    return "polylora_logits", register("polylora_logits", run)
