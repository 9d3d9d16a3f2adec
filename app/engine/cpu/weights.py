"""A checkpoint's tensors in the layout of the CPU decoder: panels, stacked over layers.

In: tensors by their Hugging Face names, in any order. Out: `cpu_decoder.Weights`. Every tensor has one place and
must come; one unpacked tensor is in memory at a time. Which modules share a product, and where each begins in it:
`app.engine.models.products`; which stacks are in 8 bits: `app.engine.models.stacks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraKey
from app.engine.config import WeightStorage
from app.engine.cpu import decoder as cpu_decoder
from app.engine.cpu.encoder import EncoderWeights
from app.engine.errors import CheckpointError
from app.engine.models.names import EMBEDDING, FINAL_NORM, LAYER_NORMS, LM_HEAD, POST_NORMS, expected_tensors
from app.engine.models.products import product_of, uniform_products
from app.engine.models.spec import ModelSpec, RopeSpec
from app.engine.models.stacks import StackWriter, log_storage
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.quantised import Quantised, Stack
from app.kernels.matmul.storing import dequantise

Floats = NDArray[np.float32]


def padded(size: int) -> int:
    """The next multiple of a panel's width."""
    return -(-size // PANEL) * PANEL


def decoder_sizes(spec: ModelSpec) -> cpu_decoder.Sizes:
    """Raises CheckpointError for layers of unequal size."""
    qkv, _, gate_up, _ = uniform_products(spec)
    first = spec.layers[0]
    q_size, kv_size, _ = qkv.padded_widths(PANEL)
    return cpu_decoder.Sizes(
        num_heads=first.attention.num_heads,
        num_kv_heads=first.attention.num_kv_heads,
        head_dim=first.attention.head_dim,
        q_size=q_size,
        kv_size=kv_size,
        mlp_size=gate_up.padded_widths(PANEL)[0],
        gelu=first.mlp.activation == "gelu_tanh",
        eps=np.float32(spec.norm_eps),
        post_norms=first.post_norms,
        softcap=np.float32(first.attention.softcap or 0.0),
        logit_softcap=np.float32(spec.logit_softcap or 0.0),
        embedding_scale=np.float32(spec.embedding_scale),
    )


class PackedModules:
    """The base's modules for `AdapterExtras`."""

    def __init__(self, spec: ModelSpec, weights: cpu_decoder.Weights | EncoderWeights) -> None:
        self._products, self._weights = uniform_products(spec), weights

    def panels(self, key: LoraKey) -> Floats:
        product = product_of(self._products, key.target)
        own = product.columns(key.target, PANEL)
        columns = slice(own.start // PANEL, -(-own.stop // PANEL))
        stack: Stack = getattr(self._weights, product.name)
        if isinstance(stack, Quantised):
            return dequantise(Quantised._make(part[key.layer, columns] for part in stack))
        return stack[key.layer, columns]

    def bias(self, key: LoraKey) -> Floats | None:
        product = product_of(self._products, key.target)
        biases: Floats = getattr(self._weights, f"{product.name}_bias")
        return biases[key.layer, product.columns(key.target, PANEL)] if product.has_bias else None


class WeightPacker:
    """Fills the stacked arrays tensor by tensor, so that at most one unpacked tensor is in memory."""

    def __init__(self, spec: ModelSpec, max_positions: int, storage: WeightStorage, team: Team) -> None:
        self._spec = spec
        count, hidden = len(spec.layers), spec.hidden_size
        attentions = [layer.attention for layer in spec.layers]
        products = uniform_products(spec)
        norm_width = attentions[0].head_dim if attentions[0].qk_norm else 0
        ropes = list(dict.fromkeys(attention.rope for attention in attentions))
        cos, sin = _rope_tables(ropes, max_positions)

        def zeros(*shape: int) -> Floats:
            return np.zeros(shape, np.float32)

        self._arrays: dict[str, Floats] = {
            "embedding": zeros(0 if spec.tie_embeddings else spec.vocab_size, hidden),
            "final_norm": zeros(hidden),
            "attention_norm": zeros(count, hidden),
            "mlp_norm": zeros(count, hidden),
            **{name: zeros(count, hidden if spec.layers[0].post_norms else 0) for name in POST_NORMS},
            "q_norm": zeros(count, norm_width),
            "k_norm": zeros(count, norm_width),
        }
        self._stacks = {"head": StackWriter((1, spec.vocab_size, hidden), storage, team)}
        self._places: dict[str, tuple[str, int]] = {}  # module in a layer -> product, first column in it
        for product in products:
            width = product.width(PANEL)
            self._stacks[product.name] = StackWriter((count, width, product.d_in), storage, team)
            self._arrays[f"{product.name}_bias"] = zeros(count, width if product.has_bias else 0)
            for target, start in zip(product.targets, product.starts(PANEL), strict=True):
                self._places[product.kind.path(target)] = product.name, start
        self._constants: dict[str, NDArray[Any]] = {
            "cos": cos,
            "sin": sin,
            "layer_rope": np.array([ropes.index(a.rope) for a in attentions], np.int64),
            "layer_window": np.array([a.window or 0 for a in attentions], np.int64),
            "scales": np.array([a.scale for a in attentions], np.float32),
        }
        self._norms: dict[str, str] = {path: name for name, path in (LAYER_NORMS | POST_NORMS).items()}

    def pack_all(self, tensors: Iterable[tuple[str, np.ndarray]]) -> cpu_decoder.Weights:
        """Consume every tensor; CheckpointError for one that has no place or is missing."""
        expected = set(expected_tensors(self._spec))
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

    def _place(self, name: str, tensor: Floats) -> None:
        if name == LM_HEAD or (name == EMBEDDING and self._spec.tie_embeddings):
            self._stacks["head"].store(0, 0, tensor)
        elif name == EMBEDDING:
            self._arrays["embedding"][:] = tensor
        elif name == FINAL_NORM:
            self._arrays["final_norm"][:] = tensor
        else:
            _, _, layer_text, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            layer = int(layer_text)
            if module in self._norms:
                self._arrays[self._norms[module]][layer] = tensor
                return
            product, column = self._places[module]
            if kind == "bias":
                self._arrays[f"{product}_bias"][layer, column : column + len(tensor)] = tensor
            else:
                self._stacks[product].store(layer, column, tensor)


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
