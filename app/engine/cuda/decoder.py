"""The decoder on a device: a step's arrays in, hidden states and logits out.

One base product per fused module for the whole batch, whatever adapters it holds; deltas are added in place after it,
per token or per run. Nothing here looks at a device value from the host and no shape depends on one, so a step can be
captured in a CUDA graph; what adapters have beside rank rows (`ExtraRows`) is done to their rows outside of graphs.

In deterministic mode every operation has fixed tiles, and a row's bits do not depend on the others. Otherwise base
products are the library's (cuBLAS), which chooses its tiles by the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.cuda.adapters import AdapterTables
from app.engine.cuda.extras import ExtraRows
from app.engine.cuda.kernels import Kernels
from app.engine.cuda.step import Step
from app.engine.cuda.weights import LayerWeights, Weights
from app.engine.models.names import LayerNorm
from app.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvMemory:
    """keys, values: [blocks, kv_heads, block_size, D] per layer."""

    keys: list[Tensor]
    values: list[Tensor]


class CudaDecoder:
    """All layers of one model over its memory."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        tables: AdapterTables,
        kv: KvMemory,
        kernels: Kernels,
        max_seq_len: int,
        *,
        deterministic: bool,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kv = kv
        self._kernels = kernels
        self._max_seq_len = max_seq_len
        self._deterministic = deterministic
        self._rank_rows = [tables.rows(layer) for layer in range(len(spec.layers))]

    def hidden_states(self, step: Step, extras: ExtraRows | None = None) -> Tensor:
        """[T, H] after the last layer; K and V of the step's tokens are written."""
        kernels = self._kernels
        hidden = torch.nn.functional.embedding(step.token_ids, self._weights.embedding)  # [T, H]
        if extras is not None:
            extras.embed(step.token_ids, hidden)
        normed = torch.empty_like(hidden)
        for index, layer in enumerate(self._weights.layers):
            self._norm(index, "attention_norm", hidden, layer.attention_norm, normed, extras)
            qkv = self._product(normed, layer.qkv, layer.qkv_bias)
            self._change(index, "qkv", normed, qkv, step, extras)
            attended = self._attend(index, layer, qkv, step, extras)
            self._add_product(index, "o", attended, layer.o, layer.o_bias, hidden, step, extras)
            self._norm(index, "mlp_norm", hidden, layer.mlp_norm, normed, extras)
            gate_up = self._product(normed, layer.gate_up, layer.gate_up_bias)
            self._change(index, "gate_up", normed, gate_up, step, extras)
            gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            kernels.gated(gate_up, gated, layer.spec.mlp.activation)
            self._add_product(index, "down", gated, layer.down, layer.down_bias, hidden, step, extras)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor, extras: ExtraRows | None = None) -> None:
        """out [P, V] float32 from the hidden states [P, H] of the rows that sample."""
        normed = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, self._weights.final_norm, self._spec.norm_eps, normed)
        if extras is not None:
            for first, end, weight in extras.final_norms():
                self._kernels.rms_norm(hidden[first:end], weight, self._spec.norm_eps, normed[first:end])
        self._float_product(normed, self._weights.head, out)
        if extras is not None:
            extras.change_logits(normed, out)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, d_in] @ weight.T, for weights [d_out, d_in] that adapters bring."""
        return self._product(x, weight, None)

    def _attend(self, index: int, layer: LayerWeights, qkv: Tensor, step: Step, extras: ExtraRows | None) -> Tensor:
        attention = layer.spec.attention
        keys, values = self._kv.keys[index], self._kv.values[index]
        num_tokens, dim = len(qkv), attention.head_dim
        pieces = [(0, num_tokens, layer.q_norm, layer.k_norm)]
        if extras is not None and layer.q_norm is not None:
            pieces = extras.head_norms(index, num_tokens, layer.q_norm, layer.k_norm)
        for first, end, q_norm, k_norm in pieces:
            self._kernels.rotate_and_write(
                qkv[first:end],
                step.positions[first:end],
                layer.cos,
                layer.sin,
                keys,
                values,
                step.kv_slots[first:end],
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=self._spec.norm_eps,
            )
        q = qkv[:, : attention.num_heads * dim].unflatten(1, (attention.num_heads, dim))
        attended = qkv.new_empty(num_tokens, attention.num_heads, dim)
        self._kernels.paged_attention(
            q,
            keys,
            values,
            step.query_starts,
            step.seq_lens,
            step.block_tables,
            attended,
            scale=attention.scale,
            max_query_len=step.max_query_len,
            max_seq_len=self._max_seq_len,
            window=attention.window,
            deterministic=self._deterministic,
        )
        return attended.flatten(1)

    def _norm(
        self, layer: int, kind: LayerNorm, x: Tensor, weight: Tensor, out: Tensor, extras: ExtraRows | None
    ) -> None:
        self._kernels.rms_norm(x, weight, self._spec.norm_eps, out)
        if extras is not None:
            for first, end, adapters_weight in extras.norms(layer, kind):
                self._kernels.rms_norm(x[first:end], adapters_weight, self._spec.norm_eps, out[first:end])

    def _add_product(
        self,
        layer: int,
        product: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        step: Step,
        extras: ExtraRows | None,
    ) -> None:
        """hidden += x @ weight.T + bias, with the deltas: the residual is where the sums start."""
        kept = extras.set_aside(layer, product, hidden) if extras is not None else []
        if self._deterministic:
            self._kernels.fixed_linear(x, weight, hidden, bias, accumulate=True)
        else:
            hidden.addmm_(x, weight.T)
            if bias is not None:
                hidden += bias
        self._change(layer, product, x, hidden, step, extras)
        if extras is not None:
            extras.put_back(kept, hidden)

    def _change(self, layer: int, product: str, x: Tensor, y: Tensor, step: Step, extras: ExtraRows | None) -> None:
        """Add the deltas of the step's adapters to a base product, and do their extras."""
        if step.max_rank:
            rows = self._rank_rows[layer][product]
            if step.block_tokens:
                self._kernels.add_lora_to_runs(
                    x,
                    y,
                    rows,
                    step.segments,
                    max_rank=step.max_rank,
                    block_tokens=step.block_tokens,
                    deterministic=self._deterministic,
                )
            else:
                self._kernels.add_lora_to_rows(x, y, rows, step.adapter_slots, max_rank=step.max_rank)
        if extras is not None:
            extras.change(layer, product, x, y)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._deterministic:
            return torch.nn.functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        self._kernels.fixed_linear(x, weight, out, bias)
        return out

    def _float_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """As `_product`, into float32 whatever x and weight are: logits are not rounded."""
        if self._deterministic:
            self._kernels.fixed_linear(x, weight, out)
        elif x.is_cuda and x.dtype != torch.float32:
            torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.T.float(), out=out)
