"""The memory a program is given and gives back: adapter tables, KV memory, what a step leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Name of the mesh axis that tensor-parallel shards lie along.
TENSOR_AXIS = "tensor"


class AdapterTables(NamedTuple):
    """Rank rows per product. qkv, gate_up: a [L, R, modules * d_in], b [L, R, shards * d_out]; o, down: a [L, R,
    shards * d_in], b [L, R, d_out]. The CPU form has its own (`cpu_tables`).

    Arrays; or, field by field, their shapes or shardings.
    """

    a_qkv: Any
    a_o: Any
    a_gate_up: Any
    a_down: Any
    b_qkv: Any
    b_o: Any
    b_gate_up: Any
    b_down: Any


class XlaTables(NamedTuple):
    """What the forms other than the CPU's are told of adapters. own: `OwnTables`, None where there are to be none."""

    rows: AdapterTables
    own: Any


class KvMemory(NamedTuple):
    """keys, values: [L, blocks, shards * kv_heads, block_size, D].

    In the CPU form keys are [..., D', block_size] and values [..., block_size, D'], D' = D rounded up to 16.
    """

    keys: Any
    values: Any


class Outcome(NamedTuple):
    """token_ids: [B] int32, the largest logit's, or None where the host looks for it (the CPU form); logits: [B, V]."""

    token_ids: Any
    logits: Any
