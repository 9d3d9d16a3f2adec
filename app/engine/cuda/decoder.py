"""The decoder on a device: a step's arrays in, hidden states and logits out.

Each fused linear module is multiplied once for the whole batch, whatever adapters it holds; LoRA deltas are added in
place afterwards, per token or per run. The host never reads a device value and no shape depends on one, so a step can
be captured in a CUDA graph. Extra weights of adapters (`ExtraRows`) are applied to their rows outside of graphs.

In batch-invariant mode every operation has fixed tiles, and a row's bits do not depend on other rows. Otherwise base
products come from the library (cuBLAS), which chooses its tiles by the batch; those of experts always have fixed tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.cuda.adapters import AdapterTables
from app.engine.cuda.extra_weights import ExtraRows
from app.engine.cuda.kernels import Kernels
from app.engine.cuda.step import Step
from app.engine.cuda.weights import LayerWeights, Weights
from app.engine.models.linear_modules import LATENT_KEYS, LATENT_VALUES
from app.engine.models.spec import ExpertsSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec
from app.engine.models.weight_names import LatentNorm, LayerNorm
from app.kernels.moe_routing.pairs import SortedPairs


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Paged KV memory per layer.

    keys, values: [blocks, kv_heads, block_size, D]. Latent attention keeps a latent and a rotated key side by side in
    keys [blocks, 1, block_size, R + E], and has no values.
    """

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
        batch_invariant: bool,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kv = kv
        self._kernels = kernels
        self._max_seq_len = max_seq_len
        self._batch_invariant = batch_invariant
        self._rank_rows = [tables.rows(layer) for layer in range(len(spec.layers))]
        self._expert_rows = [tables.expert_rows(layer) for layer in range(len(spec.layers))]

    def hidden_states(self, step: Step, extras: ExtraRows | None = None) -> Tensor:
        """Hidden states [T, H] after the last layer; writes K and V of the step's tokens."""
        hidden = torch.nn.functional.embedding(step.token_ids, self._weights.embedding)  # [T, H]
        if extras is not None:
            extras.embed(step.token_ids, hidden)
        normed, heads = torch.empty_like(hidden), self._pairs_with_heads(hidden)
        for index, layer in enumerate(self._weights.layers):
            self._norm(index, "attention_norm", hidden, layer.attention_norm, normed, extras)
            if layer.spec.attention.latent is not None:
                attended = self._attend_latents(index, layer, layer.spec.attention.latent, normed, heads, step, extras)
            else:
                qkv = self._linear(index, "qkv", normed, step, extras)
                attended = self._attend(index, layer, qkv, step, extras)
            self._add_linear(index, "o", attended, hidden, step, extras)
            self._norm(index, "mlp_norm", hidden, layer.mlp_norm, normed, extras)
            if layer.spec.experts is not None:
                self._add_experts(index, layer.spec, layer.spec.experts, normed, hidden, step, extras)
            else:
                gated = self._mlp_activation(self._linear(index, "gate_up", normed, step, extras), layer.spec.mlp)
                self._add_linear(index, "down", gated, hidden, step, extras)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor, extras: ExtraRows | None = None) -> None:
        """Write logits to out [P, V] float32 from the sampled rows' hidden states [P, H]."""
        normed = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, self._weights.final_norm, self._spec.norm_eps, normed)
        if extras is not None:
            for first, end, weight in extras.final_norms():
                self._kernels.rms_norm(hidden[first:end], weight, self._spec.norm_eps, normed[first:end])
        self._float32_linear(normed, self._weights.head, out)
        if extras is not None:
            extras.change_logits(normed, out)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, d_in] @ weight.T + bias, for weights [d_out, d_in] of the base model or of an adapter."""
        if not self._batch_invariant:
            return torch.nn.functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        self._kernels.fixed_linear(x, weight, out, bias)
        return out

    def _add_experts(
        self,
        index: int,
        layer: LayerSpec,
        mixture: ExpertsSpec,
        normed: Tensor,
        hidden: Tensor,
        step: Step,
        extras: ExtraRows | None,
    ) -> None:
        """hidden += Σ weight_e * expert_e(x) + gate * shared(x), each with its LoRA deltas (Shazeer et al. 2017)."""
        kernels, router = self._kernels, mixture.router
        logits = self._linear(index, "router", normed, step, extras)
        experts = torch.empty(len(normed), router.top_k, dtype=torch.int32, device=normed.device)
        topk_weights = torch.empty(len(normed), router.top_k, dtype=torch.float32, device=normed.device)
        kernels.route(
            logits, experts, topk_weights, normalised=router.normalised, scale=router.scale,
            num_groups=router.num_groups, top_groups=router.top_groups,
        )  # fmt: skip
        pairs = kernels.sort_pairs(experts, router.num_experts, kernels.block_rows(normed.dtype))
        gate_up = self._expert_linear(index, "experts_gate_up", normed, pairs, step, x_divisor=router.top_k)
        outputs = self._expert_linear(index, "experts_down", self._mlp_activation(gate_up, layer.mlp), pairs, step)
        shared = gates = None
        if mixture.shared is not None:
            both = self._linear(index, "shared_gate_up", normed, step, extras)
            shared = self._linear(index, "shared_down", self._mlp_activation(both, mixture.shared.mlp), step, extras)
            if mixture.shared.is_gated:
                gates = self._linear(index, "shared_gate", normed, step, extras)
        kernels.combine(outputs, topk_weights, hidden, shared, gates)

    def _expert_linear(
        self, layer: int, module: str, x: Tensor, pairs: SortedPairs, step: Step, x_divisor: int = 1
    ) -> Tensor:
        """[P, W]: every pair through its expert, with its adapter's delta. Tiles are fixed in both modes."""
        weights = self._weights.layers[layer]
        weight = weights.modules[module]
        out = x.new_empty(len(pairs.order), weight.shape[1])
        self._kernels.expert_linear(x, weight, out, pairs, weights.biases.get(module), x_divisor=x_divisor)
        if step.max_rank:
            rows = self._expert_rows[layer][module]
            self._kernels.add_lora_to_experts(
                x, out, rows, step.adapter_slots, pairs, max_rank=step.max_rank, x_divisor=x_divisor
            )
        return out

    def _mlp_activation(self, gate_up: Tensor, mlp: MlpSpec) -> Tensor:
        gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._kernels.gated_activation(gate_up, gated, mlp.activation, mlp.limit, mlp.alpha)
        return gated

    def _attend(self, index: int, layer: LayerWeights, qkv: Tensor, step: Step, extras: ExtraRows | None) -> Tensor:
        attention = layer.spec.attention
        keys, values = self._kv.keys[index], self._kv.values[index]
        num_tokens, dim = len(qkv), attention.head_dim
        pieces = [(0, num_tokens, layer.q_norm, layer.k_norm)]
        if extras is not None and layer.q_norm is not None:
            pieces = extras.head_norms(index, num_tokens, layer.q_norm, layer.k_norm)
        for first, end, q_norm, k_norm in pieces:
            if attention.whole_qk_norm:
                self._norm_whole(qkv[first:end], attention.num_heads * dim, q_norm, k_norm)
                q_norm = k_norm = None  # noqa: PLW2901
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
            sinks=layer.sinks,
            batch_invariant=self._batch_invariant,
        )
        return attended.flatten(1)

    def _pairs_with_heads(self, hidden: Tensor) -> SortedPairs | None:
        """Pair every token with every head, as if heads were experts; None without latent attention."""
        attention = self._spec.layers[0].attention
        if attention.latent is None:
            return None
        heads = torch.arange(attention.num_heads, dtype=torch.int32, device=hidden.device)
        every = heads.expand(len(hidden), -1).contiguous()
        return self._kernels.sort_pairs(every, attention.num_heads, self._kernels.block_rows(hidden.dtype))

    def _attend_latents(
        self,
        index: int,
        layer: LayerWeights,
        latent: LatentSpec,
        normed: Tensor,
        heads: SortedPairs | None,
        step: Step,
        extras: ExtraRows | None,
    ) -> Tensor:
        """Latent attention [T, N * V] (DeepSeek-AI 2024): `kv_b_proj` is applied to queries and to sums of latents,
        never to latents.
        """
        assert heads is not None, "all layers have one kind of attention"
        assert layer.latent_norm is not None, "the norm comes with the checkpoint"
        attention, rank, memory = layer.spec.attention, latent.kv_rank, self._kv.keys[index]
        name, narrow = "query", normed
        if latent.query_rank is not None:
            assert layer.query_latent_norm is not None, "the norm comes with the checkpoint"
            raw = self._linear(index, "query_a", normed, step, extras)
            name, narrow = "query_b", torch.empty_like(raw)
            self._norm(index, "query_latent_norm", raw, layer.query_latent_norm, narrow, extras, latent.norm_eps)
        queries = self._linear(index, name, narrow, step, extras)
        raw = self._linear(index, "latent_a", normed, step, extras)
        rows = raw.clone()
        self._norm(index, "latent_norm", raw[:, :rank], layer.latent_norm, rows[:, :rank], extras, latent.norm_eps)
        self._kernels.rotate_latents(
            queries, rows, step.positions, layer.cos, layer.sin, memory, step.kv_slots, num_heads=attention.num_heads
        )
        by_head = queries.view(len(normed) * attention.num_heads, -1)
        own, rotated = by_head[:, : latent.key_size], by_head[:, latent.key_size :]
        absorbed = self._expert_linear(index, LATENT_KEYS.name, own, heads, step)
        attended, shape = torch.empty_like(absorbed), (len(normed), attention.num_heads)
        self._kernels.latent_attention(
            absorbed.unflatten(0, shape),
            rotated.unflatten(0, shape),
            memory,
            step.query_starts,
            step.seq_lens,
            step.block_tables,
            attended.unflatten(0, shape),
            scale=attention.scale,
            max_query_len=step.max_query_len,
            max_seq_len=self._max_seq_len,
            batch_invariant=self._batch_invariant,
        )
        return self._expert_linear(index, LATENT_VALUES.name, attended, heads, step).view(len(normed), -1)

    def _norm_whole(self, qkv: Tensor, q_size: int, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """Normalise all heads' queries together, and all heads' keys, in place."""
        assert q_norm is not None, "both norms come with the checkpoint"
        assert k_norm is not None, "both norms come with the checkpoint"
        for part, weight in ((qkv[:, :q_size], q_norm), (qkv[:, q_size : q_size + len(k_norm)], k_norm)):
            self._kernels.rms_norm(part, weight, self._spec.norm_eps, part)

    def _norm(
        self,
        layer: int,
        kind: LayerNorm | LatentNorm,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        extras: ExtraRows | None,
        eps: float | None = None,
    ) -> None:
        """RMS norm of x into out, which must not be x. eps: the model's if None."""
        eps = self._spec.norm_eps if eps is None else eps
        self._kernels.rms_norm(x, weight, eps, out)
        if extras is not None:
            for first, end, adapters_weight in extras.norms(layer, kind):
                self._kernels.rms_norm(x[first:end], adapters_weight, eps, out[first:end])

    def _add_linear(
        self,
        layer: int,
        module: str,
        x: Tensor,
        hidden: Tensor,
        step: Step,
        extras: ExtraRows | None,
    ) -> None:
        """hidden += x @ weight.T + bias, with the deltas: sums start from the residual."""
        weights = self._weights.layers[layer]
        weight, bias = weights.modules[module], weights.biases.get(module)
        saved = extras.save_rows(layer, module, hidden) if extras is not None else []
        if self._batch_invariant:
            self._kernels.fixed_linear(x, weight, hidden, bias, accumulate=True)
        else:
            hidden.addmm_(x, weight.T)
            if bias is not None:
                hidden += bias
        self._apply_adapters(layer, module, x, hidden, step, extras)
        if extras is not None:
            extras.restore_rows(saved, hidden)

    def _apply_adapters(
        self, layer: int, module: str, x: Tensor, y: Tensor, step: Step, extras: ExtraRows | None
    ) -> None:
        """Add the step's LoRA deltas to a base product and apply extra weights."""
        if step.max_rank:
            rows = self._rank_rows[layer][module]
            if step.block_tokens:
                self._kernels.add_lora_to_runs(
                    x,
                    y,
                    rows,
                    step.segments,
                    max_rank=step.max_rank,
                    block_tokens=step.block_tokens,
                    batch_invariant=self._batch_invariant,
                )
            else:
                self._kernels.add_lora_to_rows(x, y, rows, step.adapter_slots, max_rank=step.max_rank)
        if extras is not None:
            extras.change(layer, module, x, y)

    def _linear(self, layer: int, module: str, x: Tensor, step: Step, extras: ExtraRows | None) -> Tensor:
        """x @ weight.T + bias, with the step's LoRA deltas and extra weights."""
        weights = self._weights.layers[layer]
        y = self.multiply(x, weights.modules[module], weights.biases.get(module))
        self._apply_adapters(layer, module, x, y, step, extras)
        return y

    def _float32_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Like `multiply`, but into float32 whatever x and weight are: logits are not rounded."""
        if self._batch_invariant:
            self._kernels.fixed_linear(x, weight, out)
        elif x.is_cuda and x.dtype != torch.float32:
            torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.T.float(), out=out)
