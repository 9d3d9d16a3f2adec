"""A checkpoint's tensors in the layout of the CPU decoder: panels, stacked over layers.

In: tensors by their Hugging Face names, in any order. Out: `cpu_decoder.Weights`. Every tensor has one place and
must come; one unpacked tensor is in memory at a time. Which stacks are in 8 bits: `app.engine.cpu.stacks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraKey
from app.engine.config import WeightStorage
from app.engine.cpu import decoder as cpu_decoder
from app.engine.cpu.stacks import StackWriter, log_storage
from app.engine.errors import CheckpointError
from app.engine.models.spec import ModelSpec, RopeSpec
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised, Stack
from app.kernels.matmul.storing import dequantise

Floats = NDArray[np.float32]


def padded(size: int) -> int:
    """The next multiple of a panel's width."""
    return -(-size // PANEL) * PANEL


def decoder_sizes(spec: ModelSpec) -> cpu_decoder.Sizes:
    first = spec.layers[0]
    for index, layer in enumerate(spec.layers):
        same = (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim, layer.mlp)
        if same != (first.attention.num_heads, first.attention.num_kv_heads, first.attention.head_dim, first.mlp):
            raise CheckpointError(
                f"layer {index} of {spec.name} differs in size from layer 0: not supported on the CPU"
            )
    attention = first.attention
    return cpu_decoder.Sizes(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        q_size=padded(attention.num_heads * attention.head_dim),
        kv_size=padded(attention.num_kv_heads * attention.head_dim),
        mlp_size=padded(first.mlp.intermediate_size),
        gelu=first.mlp.activation == "gelu_tanh",
        eps=np.float32(spec.norm_eps),
    )


def module_columns(sizes: cpu_decoder.Sizes) -> dict[str, tuple[str, int]]:
    """Linear module of a layer -> (field of `Weights`, first column in it)."""
    return {
        "self_attn.q_proj": ("qkv", 0),
        "self_attn.k_proj": ("qkv", sizes.q_size),
        "self_attn.v_proj": ("qkv", sizes.q_size + sizes.kv_size),
        "self_attn.o_proj": ("out", 0),
        "mlp.gate_proj": ("gate_up", 0),
        "mlp.up_proj": ("gate_up", sizes.mlp_size),
        "mlp.down_proj": ("down", 0),
    }


class PackedModules:
    """The base's modules for `AdapterExtras`."""

    def __init__(self, spec: ModelSpec, weights: cpu_decoder.Weights, sizes: cpu_decoder.Sizes) -> None:
        self._spec, self._weights = spec, weights
        self._columns = {module.rpartition(".")[2]: place for module, place in module_columns(sizes).items()}

    def panels(self, key: LoraKey) -> Floats:
        name, column = self._columns[key.target]
        stack: Stack = getattr(self._weights, name)
        columns = slice(column // PANEL, (column + padded(self._spec.target_shape(key.layer, key.target)[1])) // PANEL)
        if isinstance(stack, Quantised):
            return dequantise(Quantised._make(part[key.layer, columns] for part in stack))
        return stack[key.layer, columns]

    def bias(self, key: LoraKey) -> Floats | None:
        name, column = self._columns[key.target]
        biases: Floats = getattr(self._weights, f"{name}_bias")
        d_out = self._spec.target_shape(key.layer, key.target)[1]
        return biases[key.layer, column : column + d_out] if biases.shape[1] else None


class WeightPacker:
    """Fills the stacked arrays tensor by tensor, so that at most one unpacked tensor is in memory."""

    def __init__(
        self, spec: ModelSpec, sizes: cpu_decoder.Sizes, max_positions: int, storage: WeightStorage, team: Team
    ) -> None:
        self._spec, self._sizes = spec, sizes
        count, hidden = len(spec.layers), spec.hidden_size
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        qkv_width, q_width = sizes.q_size + 2 * sizes.kv_size, attention.num_heads * attention.head_dim
        any_layer = [layer.attention for layer in spec.layers]
        norm_width = attention.head_dim if attention.qk_norm else 0
        ropes = list(dict.fromkeys(a.rope for a in any_layer))
        cos, sin = _rope_tables(ropes, max_positions)

        def zeros(*shape: int) -> Floats:
            return np.zeros(shape, np.float32)

        self._arrays: dict[str, Floats] = {
            "embedding": zeros(0 if spec.tie_embeddings else spec.vocab_size, hidden),
            "final_norm": zeros(hidden),
            "attention_norm": zeros(count, hidden),
            "mlp_norm": zeros(count, hidden),
            "qkv_bias": zeros(count, qkv_width if attention.qkv_bias else 0),
            "q_norm": zeros(count, norm_width),
            "k_norm": zeros(count, norm_width),
            "out_bias": zeros(count, hidden if attention.o_bias else 0),
            "gate_up_bias": zeros(count, 2 * sizes.mlp_size if mlp.bias else 0),
            "down_bias": zeros(count, hidden if mlp.bias else 0),
        }
        shapes = {
            "head": (1, spec.vocab_size, hidden),
            "qkv": (count, qkv_width, hidden),
            "out": (count, hidden, q_width),
            "gate_up": (count, 2 * sizes.mlp_size, hidden),
            "down": (count, hidden, mlp.intermediate_size),
        }
        self._stacks = {name: StackWriter(shape, storage, team) for name, shape in shapes.items()}
        self._constants: dict[str, NDArray[Any]] = {
            "cos": cos,
            "sin": sin,
            "layer_rope": np.array([ropes.index(a.rope) for a in any_layer], np.int64),
            "layer_window": np.array([a.window or 0 for a in any_layer], np.int64),
            "scales": np.array([a.scale for a in any_layer], np.float32),
        }
        self._columns = module_columns(sizes)
        self._vectors = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
            "self_attn.q_norm": "q_norm",
            "self_attn.k_norm": "k_norm",
        }

    def pack_all(self, tensors: Iterable[tuple[str, np.ndarray]]) -> cpu_decoder.Weights:
        """Consume every tensor; CheckpointError for one that has no place or is missing."""
        expected = self._expected()
        for name, tensor in tensors:
            if name not in expected:
                raise CheckpointError(f"tensor {name!r} has no place in {self._spec.name}")
            expected.discard(name)
            self._place(name, np.asarray(tensor).astype(np.float32, copy=False))
        if expected:
            raise CheckpointError(f"{self._spec.name} lacks {len(expected)} tensors, the first: {min(expected)!r}")
        stacks = {name: writer.stack for name, writer in self._stacks.items()}
        log_storage(self._spec.name, stacks)
        return cpu_decoder.Weights(**self._arrays, **stacks, **self._constants)  # type: ignore[arg-type]

    def _expected(self) -> set[str]:
        attention, mlp = self._spec.layers[0].attention, self._spec.layers[0].mlp
        names = {"model.embed_tokens.weight", "model.norm.weight"}
        if not self._spec.tie_embeddings:
            names.add("lm_head.weight")
        for layer in range(len(self._spec.layers)):
            prefix = f"model.layers.{layer}."
            for module in self._columns:
                names.add(f"{prefix}{module}.weight")
                is_qkv = module.startswith("self_attn") and not module.endswith("o_proj")
                if attention.qkv_bias if is_qkv else attention.o_bias if "self_attn" in module else mlp.bias:
                    names.add(f"{prefix}{module}.bias")
            for module in self._vectors:
                if attention.qk_norm or "self_attn" not in module:
                    names.add(f"{prefix}{module}.weight")
        return names

    def _place(self, name: str, tensor: Floats) -> None:
        if name == "model.embed_tokens.weight":
            if self._spec.tie_embeddings:
                self._stacks["head"].store(0, 0, tensor)
            else:
                self._arrays["embedding"][:] = tensor
        elif name == "lm_head.weight":
            self._stacks["head"].store(0, 0, tensor)
        elif name == "model.norm.weight":
            self._arrays["final_norm"][:] = tensor
        else:
            _, _, layer_text, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            layer = int(layer_text)
            if module in self._vectors:
                self._arrays[self._vectors[module]][layer] = tensor
            elif kind == "bias":
                array, column = self._columns[module]
                self._arrays[f"{array}_bias"][layer, column : column + len(tensor)] = tensor
            else:
                array, column = self._columns[module]
                self._stacks[array].store(layer, column, tensor)


def _rope_tables(ropes: list[RopeSpec], max_positions: int) -> tuple[Floats, Floats]:
    """cos and sin [ropes, positions, rotary / 2], angles in float32 as transformers computes them."""
    positions = np.arange(max_positions, dtype=np.float32)
    tables = []
    for rope in ropes:
        angles = positions[:, None] * np.array(rope.inv_freq, np.float32)[None]
        tables.append(
            (np.cos(angles) * np.float32(rope.attention_factor), np.sin(angles) * np.float32(rope.attention_factor))
        )
    return np.stack([c for c, _ in tables]), np.stack([s for _, s in tables])
