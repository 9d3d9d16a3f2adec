"""What one shard of the decoder looks like: head counts and widths, and which columns a shard holds.

In: a `ModelSpec` and the number of tensor-parallel shards. Out: a hashable `Sizes` (a static argument of
every program) and, per module, the columns each shard owns. q, k, v, gate and up are split on the output by
heads and by feed-forward columns, each module by itself; o and down on the input in the same way. With fewer
KV heads than shards a KV head is held by several shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraKey
from app.engine.errors import CheckpointError, ConfigError
from app.engine.models.spec import ModelSpec
from app.kernels.matmul.cpu import PANEL

#: Who computes products, deltas, attention and norms: the project's CPU kernels, XLA, or XLA with deltas by Pallas.
Form = Literal["cpu", "xla", "pallas"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Integers of one shard, and of the model. `heads`, `kv_heads`, `mlp_size` are one shard's.

    `interpret`: Pallas runs in its interpreter, because the device is a CPU.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    eps: float
    gelu: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    num_shards: int
    form: Form
    interpret: bool

    @property
    def group_outputs(self) -> dict[str, tuple[int, ...]]:
        """Product -> the widths of the modules it computes side by side, in one shard."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, mlp = self.hidden_size, self.mlp_size
        return {"qkv": (q, kv, kv), "o": (hidden,), "gate_up": (mlp, mlp), "down": (hidden,)}

    @property
    def module_widths(self) -> dict[str, tuple[int, ...]]:
        """Product -> the columns it computes for each of its modules, in the CPU form rounded up to whole panels."""
        outputs = self.group_outputs
        if self.form != "cpu":
            return outputs
        return {group: tuple(map(packed_size, widths)) for group, widths in outputs.items()}

    @property
    def group_widths(self) -> dict[str, int]:
        """Product -> the columns it computes in one shard."""
        return {group: sum(widths) for group, widths in self.module_widths.items()}

    @property
    def vocab_per_shard(self) -> int:
        """Logits that a shard computes, in the CPU form rounded up to whole panels."""
        per_shard = -(-self.vocab_size // self.num_shards)
        return packed_size(per_shard) if self.form == "cpu" else per_shard

    @staticmethod
    def module_index(target: str) -> int:
        """A module's place in its product."""
        return GROUPS[GROUP_OF[target]].index(target)

    def first_column(self, target: str) -> int:
        """Where a module's columns begin among those its product computes in one shard."""
        return sum(self.module_widths[GROUP_OF[target]][: self.module_index(target)])

    @property
    def stored_dim(self) -> int:
        """Floats of a head in KV memory."""
        return packed_size(self.head_dim) if self.form == "cpu" else self.head_dim

    @property
    def group_inputs(self) -> dict[str, int]:
        """Product -> the width of its input in one shard."""
        hidden = self.hidden_size
        return {"qkv": hidden, "o": self.heads * self.head_dim, "gate_up": hidden, "down": self.mlp_size}


#: Product -> the modules computed by it, in order; and the products whose input is split over the shards.
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
ROW_PARALLEL = frozenset({"o", "down"})
#: Module -> its product.
GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}


def packed_size(num_columns: int) -> int:
    """Columns of a packed weight: whole panels."""
    return -(-num_columns // PANEL) * PANEL


def sizes_of(spec: ModelSpec, num_shards: int, form: Form, *, interpret: bool = True) -> Sizes:
    """CheckpointError for layers of unequal size; ConfigError if the model does not divide by `num_shards`."""
    first = spec.layers[0]
    attention, mlp = first.attention, first.mlp
    for index, layer in enumerate(spec.layers):
        other = layer.attention
        if (other.num_heads, other.num_kv_heads, other.head_dim, other.qk_norm, layer.mlp) != (
            attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.qk_norm, mlp,
        ):  # fmt: skip
            raise CheckpointError(
                f"layer {index} of {spec.name} differs in size from layer 0; the JAX engine needs equal layers"
            )
    kv_heads = attention.num_kv_heads
    fits = kv_heads % num_shards == 0 or num_shards % kv_heads == 0
    if attention.num_heads % num_shards or mlp.intermediate_size % num_shards or not fits:
        raise ConfigError(
            f"engine.xla.tensor_parallel {num_shards} does not divide {spec.name}: {attention.num_heads} heads, "
            f"{kv_heads} KV heads, {mlp.intermediate_size} feed-forward columns; choose a common divisor"
        )
    return Sizes(
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        heads=attention.num_heads // num_shards,
        kv_heads=max(1, kv_heads // num_shards),
        head_dim=attention.head_dim,
        mlp_size=mlp.intermediate_size // num_shards,
        eps=spec.norm_eps,
        gelu=mlp.activation == "gelu_tanh",
        qk_norm=attention.qk_norm,
        qkv_bias=attention.qkv_bias,
        o_bias=attention.o_bias,
        mlp_bias=mlp.bias,
        tied=spec.tie_embeddings,
        num_shards=num_shards,
        form=form,
        interpret=interpret,
    )


def shard_columns(spec: ModelSpec, num_shards: int) -> dict[str, NDArray[np.int64]]:
    """Module -> [num_shards, columns]: outputs a shard computes (q, k, v, gate, up) or inputs it reads (o, down)."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    q = np.arange(heads * dim).reshape(num_shards, -1)
    first_head = np.arange(num_shards) * kv_heads // num_shards
    kv_count = max(1, kv_heads // num_shards)
    kv_head = first_head[:, None] + np.arange(kv_count)  # [shards, kv_count]
    kv = (kv_head[:, :, None] * dim + np.arange(dim)).reshape(num_shards, -1)
    wide = np.arange(mlp.intermediate_size).reshape(num_shards, -1)
    return {
        "q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q, "gate_proj": wide, "up_proj": wide, "down_proj": wide,
    }  # fmt: skip


def whole_output(
    by_shard: NDArray[np.float32], spec: ModelSpec, sizes: Sizes, columns: Mapping[str, NDArray[np.int64]], key: LoraKey
) -> NDArray[np.float32]:
    """One module's [d_out] of what its product has per column, shard by shard. columns: `shard_columns`.

    Of products that are split by columns: q, k, v, gate, up.
    """
    mine = columns[key.target]
    start = sizes.first_column(key.target)
    found = np.empty(spec.target_shape(key.layer, key.target)[1], np.float32)
    found[mine] = by_shard.reshape(sizes.num_shards, -1)[:, start : start + mine.shape[1]]
    return found
