"""An encoder on the CPU: one compiled call runs all layers over whole texts, without the GIL.

Its output is the last hidden state of every token. Like the decoder (`app.engine.cpu.decoder`) it is run by every
thread of a `ThreadTeam`, with one base product per module and step and LoRA products added in place; but norms come
after what they norm, a token sees its whole text, and nothing is kept between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.lora_views import LoraView, lora_at
from app.kernels.encoder_attention.cpu import bidirectional_attention
from app.kernels.gelu.cpu import gelu
from app.kernels.layer_norm.cpu import embed_normed, layer_norm
from app.kernels.linear.cpu import LinearExtras, project
from app.kernels.machine.jit import jit
from app.kernels.matmul.int8 import Stack, layer_panels

Floats = NDArray[np.float32]


class EncoderWeights(NamedTuple):
    """Packed weights, layers stacked, like the decoder's `Weights`.

    word_embeddings: [V, H]; position_embeddings: [P, H]; token_type_embedding: [H], that of the only type.
    input_norm: [2, H], weight and bias; attention_norm, mlp_norm: [L, 2, H], the norms after attention and after the
    feed-forward.
    """

    word_embeddings: Floats
    position_embeddings: Floats
    token_type_embedding: Floats
    input_norm: Floats
    attention_norm: Floats
    mlp_norm: Floats
    qkv: Stack
    qkv_bias: Floats
    o: Stack
    o_bias: Floats
    up: Stack
    up_bias: Floats
    down: Stack
    down_bias: Floats


class EncoderSizes(NamedTuple):
    """Numbers of the model. q_size is padded to whole panels."""

    num_layers: int
    head_dim: int
    q_size: int
    scale: np.float32
    eps: np.float32


class EncoderTables(NamedTuple):
    """Rank rows of all linear modules."""

    qkv: LoraView
    o: LoraView
    up: LoraView
    down: LoraView


class EncoderStep(NamedTuple):
    """A step's arrays, as in `app.engine.batch.ForwardBatch`; position_ids are rows of the position embeddings.

    longest: tokens of the longest text. The others are like the decoder's `Step`.
    """

    token_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    longest: int
    runs: NDArray[np.int64]
    shrink_tasks: NDArray[np.int64]
    widest_rank: int
    extra_runs: NDArray[np.int64]


class EncoderWorkspace(NamedTuple):
    """Scratch for the largest step: T rows each.

    hidden, qkv and up are as wide as the panels they are written in; states, attended and activated exactly as wide as
    the products that read them. saved is as wide as hidden; shrunk: [T, 3, W].
    """

    hidden: Floats
    states: Floats
    qkv: Floats
    attended: Floats
    up: Floats
    activated: Floats
    shrunk: Floats
    saved: Floats


#: Phases of a layer, and of a step outside its layers.
LAYER_PHASES, STEP_PHASES = 16, 1


@jit
def encode(team, phase, weights, sizes, tables, extras, step, work):
    """Run every layer over the step's T tokens; leaves their last hidden states in work.states."""
    num_tokens = step.token_ids.shape[0]
    phase = embed_normed(
        team, phase, step.token_ids, step.position_ids, weights.word_embeddings, weights.position_embeddings,
        weights.token_type_embedding, weights.input_norm[0], weights.input_norm[1], sizes.eps, work.hidden[:num_tokens],
        work.states[:num_tokens],
    )  # fmt: skip
    for layer in range(sizes.num_layers):
        phase = _attention(team, phase, layer, weights, sizes, tables, extras, step, work)
        phase = _feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work)
    return phase


@jit
def _attention(team, phase, layer, weights, sizes, tables, extras, step, work):
    """states = norm(hidden + o(attention(qkv(states)))), every product with its LoRA."""
    num_tokens = step.token_ids.shape[0]
    hidden, states, qkv = work.hidden[:num_tokens], work.states[:num_tokens], work.qkv[:num_tokens]
    attended, saved, rows, rows_o = work.attended[:num_tokens], work.saved[:num_tokens], tables.qkv, tables.o
    phase = project(
        team, phase, states, layer_panels(weights.qkv, layer), weights.qkv_bias[layer], False,
        lora_at(rows, layer, layer, step, work), LinearExtras(extras, layer, rows.first, step.extra_runs, saved), qkv,
    )  # fmt: skip
    phase = bidirectional_attention(
        team, phase, qkv, sizes.q_size, sizes.q_size, sizes.head_dim, sizes.scale, step.query_starts, step.longest,
        attended,
    )  # fmt: skip
    phase = project(
        team, phase, attended, layer_panels(weights.o, layer), weights.o_bias[layer], True,
        lora_at(rows_o, layer, layer, step, work), LinearExtras(extras, layer, rows_o.first, step.extra_runs, saved),
        hidden,
    )  # fmt: skip
    norm = weights.attention_norm[layer]
    return layer_norm(team, phase, hidden, norm[0], norm[1], sizes.eps, states)


@jit
def _feed_forward(team, phase, layer, weights, sizes, tables, extras, step, work):
    """states = norm(hidden + down(gelu(up(states)))), every product with its LoRA."""
    num_tokens = step.token_ids.shape[0]
    hidden, states, up = work.hidden[:num_tokens], work.states[:num_tokens], work.up[:num_tokens]
    activated, saved, rows, rows_down = work.activated[:num_tokens], work.saved[:num_tokens], tables.up, tables.down
    phase = project(
        team, phase, states, layer_panels(weights.up, layer), weights.up_bias[layer], False,
        lora_at(rows, layer, layer, step, work), LinearExtras(extras, layer, rows.first, step.extra_runs, saved), up,
    )  # fmt: skip
    phase = gelu(team, phase, up, activated)
    phase = project(
        team, phase, activated, layer_panels(weights.down, layer), weights.down_bias[layer], True,
        lora_at(rows_down, layer, min(layer + 1, sizes.num_layers - 1), step, work),
        LinearExtras(extras, layer, rows_down.first, step.extra_runs, saved), hidden,
    )  # fmt: skip
    norm = weights.mlp_norm[layer]
    return layer_norm(team, phase, hidden, norm[0], norm[1], sizes.eps, states)
