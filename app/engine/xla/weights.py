"""A checkpoint as the stacked arrays `lax.scan` walks over, shard by shard.

In: a checkpoint's tensors, one at a time. Out: `Weights`, a pytree of NumPy arrays ready to be put on devices.
Matrices keep the checkpoint's orientation [d_out, d_in]: contracting both last axes is the form in which XLA's
CPU product gives a row the same bits for any number of rows from two on. In the CPU form they are the stacks of panels
that its kernels read, each module rounded up to whole panels, in float32 or in 8 bits (`app.engine.cpu.stacks`). Axes
that are split over tensor-parallel devices hold the shards one after the other, each packed by itself; an axis of
length 1 for them would cost copies (XLA gives it a layout of its own).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.config import WeightStorage
from app.engine.cpu.stacks import StackWriter, log_storage
from app.engine.errors import CheckpointError
from app.engine.models.names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors
from app.engine.models.spec import ModelSpec
from app.engine.xla.sizes import GROUPS, ROW_PARALLEL, Sizes, shard_columns
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised, Stack


class LayerWeights(NamedTuple):
    """Weights of all layers, [L, ...]. What a model does not have is None.

    qkv, gate_up: [L, shards * d_out, d_in], in each shard the modules' rows side by side. o, down: [L, H,
    shards * d_in]. In the CPU form a `Stack`: [L, shards * P, d_in, 16] and [L, P, shards * d_in, 16]. qkv_bias,
    gate_up_bias: [L, shards * d_out], d_out padded likewise. o_bias, down_bias, norms: [L, H]. q_norm, k_norm: [L, D].
    rope, window: [L] int32, index into the rope tables and keys visible (0 is all). scale: [L].
    """

    attention_norm: Any
    mlp_norm: Any
    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    qkv_bias: Any
    o_bias: Any
    gate_up_bias: Any
    down_bias: Any
    q_norm: Any
    k_norm: Any
    rope: Any
    window: Any
    scale: Any


class Weights(NamedTuple):
    """embedding: [V, H]. head: [V padded to a multiple of shards, H], in the CPU form a `Stack` [1, shards * P, H, 16].
    With tied embeddings and one shard there is only one of them: the head in the CPU form, the embedding in the others;
    the other one is None.

    final_norm: [H]. cos, sin: [ropes, positions, D / 2]. ones: [8, max(H, D)].
    """

    embedding: Any
    head: Any
    final_norm: Any
    cos: Any
    sin: Any
    ones: Any
    layers: LayerWeights


_MODULES = {
    "self_attn.q_proj": ("qkv", "q_proj"),
    "self_attn.k_proj": ("qkv", "k_proj"),
    "self_attn.v_proj": ("qkv", "v_proj"),
    "self_attn.o_proj": ("o", "o_proj"),
    "mlp.gate_proj": ("gate_up", "gate_proj"),
    "mlp.up_proj": ("gate_up", "up_proj"),
    "mlp.down_proj": ("down", "down_proj"),
}
_VECTORS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}


def read_weights(
    spec: ModelSpec, sizes: Sizes, tensors: Iterable[tuple[str, NDArray[Any]]], max_positions: int,
    storage: WeightStorage = "float32",
) -> Weights:  # fmt: skip
    """Consume every tensor, as float32. CheckpointError for one that has no place, or is missing.

    storage: of the CPU form's products; the other forms have float32 only.
    """
    with closing(Team(len(os.sched_getaffinity(0)))) as team:
        return _read(spec, sizes, tensors, max_positions, storage, team)


def _read(
    spec: ModelSpec, sizes: Sizes, tensors: Iterable[tuple[str, NDArray[Any]]], max_positions: int,
    storage: WeightStorage, team: Team,
) -> Weights:  # fmt: skip
    arrays = _empty_layers(sizes, storage, team)
    top: dict[str, NDArray[np.float32]] = {}
    columns = shard_columns(spec, sizes.num_shards)
    missing = set(expected_tensors(spec))
    for name, stored in tensors:
        if name not in missing:
            raise CheckpointError(f"tensor {name!r} has no place in {spec.name}")
        missing.discard(name)
        tensor = np.asarray(stored).astype(np.float32, copy=False)
        if name in (EMBEDDING, FINAL_NORM, LM_HEAD):
            top[name] = tensor
        else:
            _place(arrays, columns, sizes, name, tensor)
    if missing:
        raise CheckpointError(f"{spec.name} lacks {len(missing)} tensors, the first: {min(missing)!r}")
    attentions = [layer.attention for layer in spec.layers]
    ropes = list(dict.fromkeys(attention.rope for attention in attentions))
    positions = np.arange(max_positions, dtype=np.float32)
    angles = [positions[:, None] * np.array(rope.inv_freq, np.float32)[None] for rope in ropes]
    factors = [np.float32(rope.attention_factor) for rope in ropes]
    arrays["rope"] = np.array([ropes.index(attention.rope) for attention in attentions], np.int32)
    arrays["window"] = np.array([attention.window or 0 for attention in attentions], np.int32)
    arrays["scale"] = np.array([attention.scale for attention in attentions], np.float32)
    is_cpu, one_matrix = sizes.form == "cpu", spec.tie_embeddings and sizes.num_shards == 1
    head: Any = None
    if is_cpu or not one_matrix:
        head = _split_vocabulary(top[EMBEDDING if spec.tie_embeddings else LM_HEAD], sizes)
    if is_cpu:
        writer = StackWriter((sizes.num_shards, len(head) // sizes.num_shards, sizes.hidden_size), storage, team)
        for shard, part in enumerate(np.split(head, sizes.num_shards)):
            writer.store(shard, 0, part)
        head = _joined(writer.stack, sizes.num_shards, row_parallel=False)
        for group in GROUPS:
            arrays[group] = _joined(arrays[group].stack, sizes.num_shards, row_parallel=group in ROW_PARALLEL)
        log_storage(spec.name, {"head": head, **{group: arrays[group] for group in GROUPS}})
    return Weights(
        embedding=None if is_cpu and one_matrix else top[EMBEDDING],
        head=head,
        final_norm=top[FINAL_NORM],
        cos=np.stack([np.cos(a) * f for a, f in zip(angles, factors, strict=True)]),
        sin=np.stack([np.sin(a) * f for a, f in zip(angles, factors, strict=True)]),
        ones=np.ones((8, max(sizes.hidden_size, sizes.head_dim)), np.float32),
        layers=LayerWeights(**arrays),
    )


def _empty_layers(sizes: Sizes, storage: WeightStorage, team: Team) -> dict[str, Any]:
    count, shards, hidden = sizes.num_layers, sizes.num_shards, sizes.hidden_size
    widths, inputs = sizes.group_widths, sizes.group_inputs
    biased = {"qkv": sizes.qkv_bias, "o": sizes.o_bias, "gate_up": sizes.mlp_bias, "down": sizes.mlp_bias}
    arrays: dict[str, Any] = {name: np.zeros((count, hidden), np.float32) for name in ("attention_norm", "mlp_norm")}
    for group in GROUPS:
        width, row_parallel = widths[group], group in ROW_PARALLEL
        if sizes.form == "cpu":
            arrays[group] = StackWriter((count * shards, width, inputs[group]), storage, team)
        else:
            columns, depth = (width, shards * inputs[group]) if row_parallel else (shards * width, inputs[group])
            arrays[group] = np.empty((count, columns, depth), np.float32)
        bias_width = hidden if row_parallel else shards * width
        arrays[f"{group}_bias"] = np.zeros((count, bias_width), np.float32) if biased[group] else None
    for name in ("q_norm", "k_norm"):
        arrays[name] = np.zeros((count, sizes.head_dim), np.float32) if sizes.qk_norm else None
    return arrays


def _place(
    arrays: dict[str, Any],
    columns: dict[str, NDArray[np.int64]],
    sizes: Sizes,
    name: str,
    tensor: NDArray[np.float32],
) -> None:
    """Put "model.layers.<n>.<module>.<kind>" where it belongs."""
    _, _, layer_text, rest = name.split(".", 3)
    path, kind = rest.rsplit(".", 1)
    layer = int(layer_text)
    if path in _VECTORS:
        arrays[_VECTORS[path]][layer] = tensor
        return
    group, module = _MODULES[path]
    index = GROUPS[group].index(module)
    start = sum(sizes.module_widths[group][:index])
    end = start + sizes.group_outputs[group][index]
    if kind == "bias":
        target = arrays[f"{group}_bias"][layer]
        if group in ROW_PARALLEL:
            target[:] = tensor
        else:
            target.reshape(sizes.num_shards, -1)[:, start:end] = tensor[columns[module]]
    elif sizes.form == "cpu":
        for shard, mine in enumerate(columns[module]):
            part = tensor[:, mine] if group in ROW_PARALLEL else tensor[mine]
            arrays[group].store(layer * sizes.num_shards + shard, start, np.ascontiguousarray(part))
    elif group in ROW_PARALLEL:
        arrays[group][layer] = tensor[:, columns[module].reshape(-1)]
    else:
        target = arrays[group][layer]
        target.reshape(sizes.num_shards, -1, target.shape[1])[:, start:end] = tensor[columns[module]]


def _joined(stack: Stack, num_shards: int, *, row_parallel: bool) -> Stack:
    """[L * shards, P, d_in, 16] -> [L, shards * P, d_in, 16], or [L, P, shards * d_in, 16]; in 8 bits each of three."""
    if num_shards == 1:
        return stack
    if isinstance(stack, Quantised):
        return Quantised(*(_joined(part, num_shards, row_parallel=row_parallel) for part in stack))  # type: ignore[arg-type]
    split = stack.reshape(-1, num_shards, *stack.shape[1:])
    if row_parallel:
        split = split.swapaxes(1, 2)  # [L, P, shards, d_in, 16]
        return np.ascontiguousarray(split).reshape(*split.shape[:2], -1, PANEL)
    return split.reshape(len(split), -1, *stack.shape[2:])


def _split_vocabulary(head: NDArray[np.float32], sizes: Sizes) -> NDArray[np.float32]:
    """[V, H] -> [V padded to a multiple of shards (in the CPU form of whole panels), H]; what is added is zero and cut
    off the logits."""
    num_rows = sizes.num_shards * sizes.vocab_per_shard
    if num_rows == len(head):
        return head
    padded = np.zeros((num_rows, head.shape[1]), np.float32)
    padded[: len(head)] = head
    return padded
