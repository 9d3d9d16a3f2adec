"""A base model as data: one decoder per backend reads this; there is no file per model family.

`spec_from_config` and `spec_from_gguf` build a `ModelSpec`. A configuration value that would change the arithmetic and
has no field here is a `CheckpointError` naming it; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.engine.errors import CheckpointError

#: How a text's embedding is made of its tokens' hidden states: the last one, their mean, or the first one.
Pooling = Literal["last", "mean", "cls"]

MAX_LAYERS = 1_000  # the deepest published decoders have some 130
MAX_HEAD_DIM = 8_192  # the widest published heads have 576
MAX_EXPERTS = 4_096  # the most that a published layer has are some 512
MAX_SIZE = 2**31 - 1  # for any count in a configuration: the range of int32 indices


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021), half-split ("rotate_half") layout.

    `inv_freq` has rotary_dim/2 entries with any scaling (linear, llama3, yarn) already applied;
    cos and sin are multiplied by `attention_factor`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA, DeepSeek-AI 2024): keys and values of all heads come from one latent vector per
    token.

    The latent is normalised and `kv_rank` wide. A head's key is `key_size` numbers computed from it, then `rope_size`
    rotated ones that all heads share; its value is `value_size` numbers computed from it. Rotation pairs neighbours,
    not halves. `query_rank`: width of the queries' own latent, or None.
    """

    kv_rank: int
    key_size: int
    rope_size: int
    value_size: int
    query_rank: int | None
    norm_eps: float

    @property
    def width(self) -> int:
        """Numbers in the KV cache per token: the latent and the rotated part of keys."""
        return self.kv_rank + self.rope_size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. `window` is the number of keys a query sees, including itself.

    softcap c: a score s becomes c * tanh(s / c) before the softmax (Gemma 2). `qk_norm`: each head's query and key are
    normalised; `whole_qk_norm`: all heads' together. `sinks`: each head's softmax has one more score, without a value.
    With `latent`, `head_dim` is a query's and `qkv_bias` that of the modules that make latents.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    latent: LatentSpec | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated feed-forward: down(act(gate(x)) * up(x)); an encoder's has no gate: down(act(up(x))).

    With a `limit`, gate is at most that and up within ± that, and the input of down is (up + 1) * gate * logistic(alpha
    * gate) (gpt-oss).
    """

    intermediate_size: int
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Routes each token to the `top_k` of `num_experts` with the largest softmax weights over all experts' logits.

    Equal weights prefer the lower index. `normalised`: the chosen weights are divided by their sum; then they are
    multiplied by `scale`. With `num_groups` equal groups of neighbours, only the `top_groups` with the largest single
    weights are considered. `name`: its module within the layer's "mlp".
    """

    num_experts: int
    top_k: int
    normalised: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    name: str = "gate"
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """A feed-forward that every token passes besides its experts. `name`: its module within the layer's "mlp".

    `is_gated`: its output is multiplied by the logistic function of a linear map of the token to one number.
    """

    name: str
    mlp: MlpSpec
    is_gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al. 2017): Σ weight * expert(x) over a token's experts, plus the shared expert.

    `alternates`: where one tensor, of a checkpoint or adapter, holds gate and up, their outputs alternate; otherwise
    gate's come first.
    """

    router: RouterSpec
    shared: SharedExpertSpec | None = None
    alternates: bool = False


class StoredModule(NamedTuple):
    """A linear module as a checkpoint's headers show it: its path in the layer ("self_attn.q_proj") and its sizes."""

    path: str
    d_in: int
    d_out: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One pre-norm decoder layer, or one post-norm layer of an encoder.

    `mlp`: its feed-forward, or each expert's if there are `experts`. `post_norms`: the outputs of attention and
    feed-forward are normalised too, before they are added. `stored`: the linear modules of a layer whose arithmetic
    only another program knows (`hf.headers`); then `attention` and `mlp` are empty.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    experts: ExpertsSpec | None = None
    post_norms: bool = False
    stored: tuple[StoredModule, ...] = ()


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A BERT (Devlin et al. 2019) or RoBERTa: attention is bidirectional, norms have a mean and a bias and follow
    attention and feed-forward, positions are learned.

    num_positions: rows of the position table; a text's first token takes row `first_position`. The padding token, if
    any, has the id first_position - 1 and takes the row of its id. num_segments: rows of the token type table; texts
    use the first.
    """

    num_positions: int
    first_position: int
    num_segments: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal decoder, or an encoder. `digest` identifies the weights' contents; `name` is for people.

    `eos_token_ids` end a sequence unless the request says otherwise. `pooling` is the default for embeddings. Token
    embeddings are multiplied by `embedding_scale`. logit_softcap c: a logit l becomes c * tanh(l / c).
    """

    name: str
    family: str
    digest: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    pooling: Pooling = "last"
    encoder: EncoderSpec | None = None

    @property
    def has_gemma_arithmetic(self) -> bool:
        """Whether anything beyond Llama-like attention, norms and feed-forward is computed."""
        layers = self.layers
        return (
            self.embedding_scale != 1.0
            or self.logit_softcap is not None
            or any(layer.post_norms or layer.attention.softcap is not None for layer in layers)
        )


def checked_num_layers(num_layers: int) -> int:
    """`num_layers`; CheckpointError if so many would exhaust memory before tensor names are checked."""
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"the model claims {num_layers} layers; at most {MAX_LAYERS} are read. Is it damaged?")
    return num_layers


def checked_head_dim(head_dim: int) -> int:
    """`head_dim`; CheckpointError if its rotary frequencies alone would exhaust memory."""
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(
            f"the model claims heads that are {head_dim} wide; at most {MAX_HEAD_DIM} are read. Is it damaged?"
        )
    return head_dim
