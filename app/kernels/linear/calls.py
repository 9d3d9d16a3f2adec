"""Whole linear modules on the CPU inside XLA programs: what happens in the custom calls that `ffi` makes.

In: a call's scalars and buffers (`xla_call`), in the order that `ffi` gives them. Out: its results, in place. Weights
are a `Stack`, in float32 or in 8 bits: a call has a target for each, and what a model does not use is not compiled.
Nothing but a call's scalars and sizes decides how many pieces of work there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from app.kernels.extras.cpu import (
    ATTENTION_NORM,
    MLP_NORM,
    own_embedding,
    own_gather_normed,
    own_head,
    own_head_inputs,
    own_rms_norm,
)  # fmt: skip
from app.kernels.extras.ffi import tables_of
from app.kernels.linear.cpu import Own, gate_and_up, project
from app.kernels.machine.compiled import compiled
from app.kernels.machine.scalars import float_from_bits
from app.kernels.matmul.quantised import Quantised, layer_panels
from app.kernels.matmul.quantised import embed as embed_rows
from app.kernels.norms.cpu import gather_normed, rms_norm
from app.kernels.sgmv.cpu import RowPlaces, shrink
from app.kernels.sgmv.fetching import NextShrink
from app.kernels.xla_call import (
    args_of,
    bools,
    buffer,
    floats,
    ints,
    leave_record,
    octets,
    register,
    size,
    task,
    team_of,
)

_LAYER, _NUM_ROWS, _NUM_RUNS, _NUM_TASKS, _WIDEST, _NUM_EXTRA, _MODULE, _EPS, _GELU = range(9)
#: A `Stack` has three buffers: the panels or levels at _W, then scales and offsets.
_X, _W, _, _, _BIAS, _OTHER, _STARTS, _IN_BF16, _RANKS, _RUNS, _TASKS, _EXTRAS, _EXTRA_RUNS, _SLOTS, _TABLES = range(15)
#: Place of down among the modules.
_DOWN = 6


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
def _rows_of(args, b, layer):
    """A layer's rows of buffer b [L, R, W]."""
    shape = (size(args, b, 1), size(args, b, 2))
    return floats(buffer(args, b) + layer * shape[0] * shape[1] * 4, shape)


@compiled
def _wide(args, b):
    """The float32 `Stack` of buffer b."""
    return floats(buffer(args, b), (size(args, b, 0), size(args, b, 1), size(args, b, 2), size(args, b, 3)))


@compiled
def _quantised(args, b):
    """The 8-bit `Stack` of buffers b to b + 2."""
    shape = (size(args, b, 0), size(args, b, 1), size(args, b, 2), size(args, b, 3))
    groups = (shape[0], shape[1], size(args, b + 1, 2), shape[3])
    return Quantised(
        octets(buffer(args, b), shape), floats(buffer(args, b + 1), groups), floats(buffer(args, b + 2), groups)
    )


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
        float_from_bits(args[_EPS]),
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
def _next_shrink(args, b, layer, first, end):
    """Of modules first to end of a layer, whose a are buffers b to b + 2."""
    a = _panels_of(args, b, layer), _panels_of(args, b + 1, layer), _panels_of(args, b + 2, layer)
    return NextShrink(a, _ranks_of(args, _RANKS, layer)[:, first:end])


@compiled
def _run_qkv(team, args, stack):
    """Results: qkv; scratch: normed, shrunk."""
    layer, num_rows, result = args[_LAYER], args[_NUM_ROWS], _TABLES + 9
    normed, h = _matrix(args, result + 1, num_rows), _cube(args, result + 2, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, 0:3]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    _normed(team, args, ATTENTION_NORM, normed)
    if runs.shape[0] > 0:
        a = _panels_of(args, _TABLES, layer), _panels_of(args, _TABLES + 1, layer), _panels_of(args, _TABLES + 2, layer)
        shrink(team, 1, normed, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    b = _rows_of(args, _TABLES + 3, layer), _rows_of(args, _TABLES + 4, layer), _rows_of(args, _TABLES + 5, layer)
    upcoming = _next_shrink(args, _TABLES + 6, layer, 3, 5)
    project(
        team, 2, normed, layer_panels(stack, layer), _vector_of(args, _BIAS, layer), False, h, b, ranks, runs,
        places, upcoming, _own(args, normed), _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_gated(team, args, stack):
    """Results: gated; scratch: normed, shrunk, gate and up."""
    layer, num_rows, result = args[_LAYER], args[_NUM_ROWS], _TABLES + 7
    normed, h = _matrix(args, result + 1, num_rows), _cube(args, result + 2, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, 4:6]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    _normed(team, args, MLP_NORM, normed)
    if runs.shape[0] > 0:
        a = _panels_of(args, _TABLES, layer), _panels_of(args, _TABLES + 1, layer)
        shrink(team, 1, normed, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    b = _rows_of(args, _TABLES + 2, layer), _rows_of(args, _TABLES + 3, layer)
    upcoming = _next_shrink(args, _TABLES + 4, layer, 6, 7)
    gate_and_up(
        team, 2, normed, layer_panels(stack, layer), _vector_of(args, _BIAS, layer), h, b, ranks, runs, places,
        upcoming, _own(args, normed), args[_GELU] != 0, _matrix(args, result + 3, num_rows),
        _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_add(team, args, stack):
    """Results: the sum, where `other` was; scratch: shrunk, kept."""
    layer, num_rows, module, result = args[_LAYER], args[_NUM_ROWS], args[_MODULE], _TABLES + 5
    x, h = _matrix(args, _X, num_rows), _cube(args, result + 1, num_rows)
    ranks = _ranks_of(args, _RANKS, layer)[:, module : module + 1]
    runs, places = _runs_of(args, _RUNS, args[_NUM_RUNS]), _places_of(args)
    if runs.shape[0] > 0:
        a = (_panels_of(args, _TABLES, layer),)
        shrink(team, 0, x, a, ranks, _runs_of(args, _TASKS, args[_NUM_TASKS]), args[_WIDEST], places, h)
    upcoming = _next_shrink(args, _TABLES + 2, layer, 5, 6)
    if module == _DOWN:
        upcoming = _next_shrink(args, _TABLES + 2, min(layer + 1, size(args, _RANKS, 0) - 1), 0, 3)
    project(
        team, 1, x, layer_panels(stack, layer), _vector_of(args, _BIAS, layer), True, h,
        (_rows_of(args, _TABLES + 1, layer),), ranks, runs, places, upcoming,
        _own(args, _matrix(args, result + 2, num_rows)), _matrix(args, result, num_rows),
    )  # fmt: skip


@compiled
def _run_embed(team, args, head):
    """scalars: rows, runs with extras, has an embedding. Buffers: token ids, head (three), embedding, ranks, extras,
    slots, out."""
    token_ids, hidden_size = ints(buffer(args, 0), (args[0],)), size(args, 1, 2)
    embedding = floats(buffer(args, 4), (size(args, 4, 0) if args[2] else 0, hidden_size))
    out = _matrix(args, 8, args[0])[:, :hidden_size]
    embed_rows(team, 0, token_ids, embedding, head, out)
    if args[1] > 0:
        own_embedding(team, 1, token_ids, _extras_of(args, 6, 5), _indices_of(args, 7), out)


@compiled
def _run_logits(team, args, head):
    """scalars: sampled rows, runs with extras, those that sample, eps, scratch's address and width. Buffers: hidden,
    head (three), sampled rows, norm, ranks, extras, runs that sample, slots; results: logits, normed rows."""
    num_rows, eps = args[0], float_from_bits(args[3])
    hidden, rows = _matrix(args, 0, size(args, 0, 0)), ints(buffer(args, 4), (num_rows,))
    norm, sampled = floats(buffer(args, 5), (size(args, 5, 0),)), _matrix(args, 11, num_rows)
    runs, tables = _runs_of(args, 8, args[2]), _extras_of(args, 7, 6)
    address = (args[4] & np.int64(0xFFFFFFFF)) | (args[5] << 32)
    inputs = floats(address, (num_rows, args[6]))
    if args[1] > 0:
        own_gather_normed(team, 0, hidden, rows, norm, eps, tables.final_norm, _indices_of(args, 9), sampled)
        own_head_inputs(team, 1, sampled, tables, runs, inputs)
    else:
        gather_normed(team, 0, hidden, rows, norm, eps, sampled)
    own_head(team, 2, sampled, layer_panels(head, 0), tables, runs, inputs, _matrix(args, 10, num_rows))


# -- targets: Numba keeps compiled code only of functions that have a name of their own ---------------


def embed(record: int) -> None:
    args = args_of(record)
    _run_embed(team_of(record), args, _wide(args, _W))
    leave_record(record)


def embed_quantised(record: int) -> None:
    args = args_of(record)
    _run_embed(team_of(record), args, _quantised(args, _W))
    leave_record(record)


def norm_qkv(record: int) -> None:
    args = args_of(record)
    _run_qkv(team_of(record), args, _wide(args, _W))
    leave_record(record)


def norm_qkv_quantised(record: int) -> None:
    args = args_of(record)
    _run_qkv(team_of(record), args, _quantised(args, _W))
    leave_record(record)


def norm_gated(record: int) -> None:
    args = args_of(record)
    _run_gated(team_of(record), args, _wide(args, _W))
    leave_record(record)


def norm_gated_quantised(record: int) -> None:
    args = args_of(record)
    _run_gated(team_of(record), args, _quantised(args, _W))
    leave_record(record)


def add_product(record: int) -> None:
    args = args_of(record)
    _run_add(team_of(record), args, _wide(args, _W))
    leave_record(record)


def add_product_quantised(record: int) -> None:
    args = args_of(record)
    _run_add(team_of(record), args, _quantised(args, _W))
    leave_record(record)


def logits(record: int) -> None:
    args = args_of(record)
    _run_logits(team_of(record), args, _wide(args, _W))
    leave_record(record)


def logits_quantised(record: int) -> None:
    args = args_of(record)
    _run_logits(team_of(record), args, _quantised(args, _W))
    leave_record(record)


@cache
def target(run: Callable[[int], None]) -> tuple[str, Any]:
    """The name of one of the functions above as a custom call, and what must live for it."""
    name = f"polylora_{run.__name__}"
    return name, register(name, task(run))
