"""What adapters bring beside rank rows, on a device: DoRA scales, biases, norms, token rows, whole matrices.

In: an adapter and its slot, when it is written; the runs of a step. Out: `OwnRows`, which changes the rows of the
step's adapters that have something of their own, run by run, after the base's operation was done for the whole batch:
rows of others are not touched. Steps without such rows know nothing of this. What can be computed once is
computed here, as on the CPU (`app.kernels.extras.reference` is the definition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.extras import ModuleExtras, module_extras, module_shift, replaced_norms
from app.engine.adapters.lora import LoraAdapter, LoraKey, LoraPair, TokenRows, widened
from app.engine.cuda.weights import PRODUCTS, Weights, columns_of, to_tensor
from app.engine.models.names import EMBEDDING, FINAL_NORM, LM_HEAD
from app.engine.models.spec import ModelSpec
from app.kernels.dora.torch import dora_scale

#: x [T, d_in], weight [d_out, d_in] -> [T, d_out]: the decoder's own product.
Product = Callable[[Tensor, Tensor], Tensor]


class OwnModule(NamedTuple):
    """y = scale * y + shift, y the base's product with the delta, or weight @ x."""

    weight: Tensor | None
    scale: Tensor | None
    shift: Tensor | None


class OwnTokens(NamedTuple):
    """Rows [n, H] in place of a matrix's, for the token ids [n], ascending."""

    ids: Tensor
    rows: Tensor


@dataclass(slots=True)
class OwnParts:
    """Everything one adapter has beside rank rows. norms: by canonical name. Deltas: a [r, .], b [r, .]."""

    modules: dict[LoraKey, OwnModule] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    embedding: Tensor | None = None
    embedding_tokens: OwnTokens | None = None
    embedding_delta: tuple[Tensor, Tensor] | None = None
    head: Tensor | None = None
    head_tokens: OwnTokens | None = None
    head_delta: tuple[Tensor, Tensor] | None = None


class GpuExtras:
    """Own parts by adapter slot."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec = spec
        self._weights = weights
        self._held: dict[int, OwnParts] = {}
        self._device, self._dtype = weights.embedding.device, weights.embedding.dtype

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Take the slot's parts from `adapter`, dropping what was there."""
        self.release(adapter_slot)
        if adapter.features:
            self._held[adapter_slot] = self._parts(adapter)

    def release(self, adapter_slot: int) -> None:
        """Forget the slot's parts."""
        self._held.pop(adapter_slot, None)

    def runs(
        self, run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32]
    ) -> list[tuple[int, int, OwnParts]]:
        """(first row, end, parts) of the runs whose adapter has parts of its own."""
        if not self._held:
            return []
        bounds = zip(run_starts[:-1].tolist(), run_starts[1:].tolist(), run_adapter_slots.tolist(), strict=True)
        return [(first, end, self._held[slot]) for first, end, slot in bounds if slot in self._held]

    def _parts(self, adapter: LoraAdapter) -> OwnParts:
        parts = OwnParts()
        for key, extras in module_extras(adapter, self._spec).items():
            parts.modules[key] = self._module(adapter, key, extras)
        for name in replaced_norms(adapter):
            parts.norms[name] = self._floats(adapter.replaced[name])
        if EMBEDDING in adapter.replaced:
            parts.embedding = self._matrix(adapter.replaced[EMBEDDING])
        if LM_HEAD in adapter.replaced:
            parts.head = self._matrix(adapter.replaced[LM_HEAD])
        if "embed_tokens" in adapter.token_rows:
            parts.embedding_tokens = self._tokens(adapter.token_rows["embed_tokens"])
        if "lm_head" in adapter.token_rows:
            parts.head_tokens = self._tokens(adapter.token_rows["lm_head"])
        if "embed_tokens" in adapter.outer:
            parts.embedding_delta = self._delta(adapter.outer["embed_tokens"])
        if "lm_head" in adapter.outer:
            parts.head_delta = self._delta(adapter.outer["lm_head"])
        return parts

    def _module(self, adapter: LoraAdapter, key: LoraKey, extras: ModuleExtras) -> OwnModule:
        product, first, end = columns_of(self._spec, key.layer)[key.target]
        layer = self._weights.layers[key.layer]
        scale = shift = weight = None
        if extras.has_scale:
            pair = adapter.weights[key]
            scale = dora_scale(
                self._floats(adapter.magnitudes[key]),
                getattr(layer, product)[first:end],
                self._floats(widened(pair.a)),
                self._floats(widened(pair.b)),
            )
        if extras.weight is not None:
            weight = self._matrix(adapter.replaced[extras.weight])
        if extras.has_shift:
            bias = getattr(layer, f"{product}_bias")
            base = None if bias is None else bias[first:end].float().cpu().numpy()
            host_scale = None if scale is None else scale.cpu().numpy()
            shift = self._floats(module_shift(adapter, key, extras, host_scale, base, end - first))
        return OwnModule(weight, scale, shift)

    def _tokens(self, token_rows: TokenRows) -> OwnTokens:
        ids = np.array(token_rows.token_ids, np.int64)
        order = np.argsort(ids)
        return OwnTokens(torch.from_numpy(ids[order]).to(self._device), self._matrix(token_rows.rows[order]))

    def _delta(self, pair: LoraPair) -> tuple[Tensor, Tensor]:
        return self._matrix(pair.a), self._matrix(pair.b)

    def _matrix(self, values: NDArray[np.float32]) -> Tensor:
        """A copy on the device, never the adapter's own memory."""
        return to_tensor(values).to(self._device, self._dtype, copy=True)

    def _floats(self, values: NDArray[np.float32]) -> Tensor:
        return to_tensor(values).to(self._device, copy=True)


class OwnRows:
    """One step's rows with parts of their own."""

    def __init__(
        self, runs: list[tuple[int, int, OwnParts]], sample_rows: NDArray[np.int32], spec: ModelSpec, product: Product
    ) -> None:
        """`runs` over the step's tokens; `sample_rows`: [P] ascending."""
        self._runs = runs
        self._spec = spec
        self._product = product
        bounds = [np.searchsorted(sample_rows, run[:2]).tolist() for run in runs]
        self._samples = [(first, end, run[2]) for (first, end), run in zip(bounds, runs, strict=True) if first < end]

    def embed(self, token_ids: Tensor, hidden: Tensor) -> None:
        """hidden [T, H] in place, right after the lookup."""
        for first, end, own in self._runs:
            ids, rows = token_ids[first:end].long(), hidden[first:end]
            if own.embedding is not None:
                rows.copy_(own.embedding[ids])
            if own.embedding_tokens is not None:
                places = torch.searchsorted(own.embedding_tokens.ids, ids).clamp(max=len(own.embedding_tokens.ids) - 1)
                is_own = own.embedding_tokens.ids[places] == ids
                rows.copy_(torch.where(is_own[:, None], own.embedding_tokens.rows[places], rows))
            if own.embedding_delta is not None:
                a, b = own.embedding_delta
                rows += self._product(a[:, ids].T.contiguous(), b.T.contiguous())

    def norms(self, name: str) -> Iterator[tuple[int, int, Tensor]]:
        """Runs (first row, end, weight) that have their own norm of that name."""
        return ((first, end, own.norms[name]) for first, end, own in self._runs if name in own.norms)

    def head_norms(
        self, layer: int, num_tokens: int, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> list[tuple[int, int, Tensor | None, Tensor | None]]:
        """All rows cut into pieces (first row, end, q norm, k norm) with one pair of norms each."""
        names = [f"model.layers.{layer}.self_attn.{which}_norm.weight" for which in "qk"]
        pieces: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        at = 0
        for first, end, own in self._runs:
            if not any(name in own.norms for name in names):
                continue
            if at < first:
                pieces.append((at, first, q_norm, k_norm))
            pieces.append((first, end, own.norms.get(names[0], q_norm), own.norms.get(names[1], k_norm)))
            at = end
        if at < num_tokens:
            pieces.append((at, num_tokens, q_norm, k_norm))
        return pieces

    def set_aside(self, layer: int, product: str, out: Tensor) -> list[tuple[int, int, Tensor]]:
        """Zero the rows that a product is added to, where it is scaled or shifted first; see `put_back`."""
        kept = []
        for first, end, own in self._runs:
            if any(LoraKey(layer, target) in own.modules for target in PRODUCTS[product]):
                kept.append((first, end, out[first:end].clone()))
                out[first:end] = 0
        return kept

    def put_back(self, kept: list[tuple[int, int, Tensor]], out: Tensor) -> None:
        """Add again what `set_aside` took."""
        for first, end, rows in kept:
            out[first:end] += rows

    def change(self, layer: int, product: str, x: Tensor, out: Tensor) -> None:
        """The modules' outputs in place: out [T, W] holds the base's product with the deltas."""
        columns = columns_of(self._spec, layer)
        for first, end, own in self._runs:
            for target in PRODUCTS[product]:
                module = own.modules.get(LoraKey(layer, target))
                if module is None:
                    continue
                _, low, high = columns[target]
                part = out[first:end, low:high]
                y = part.float() if module.weight is None else self._product(x[first:end], module.weight).float()
                y = y if module.scale is None else y * module.scale
                part.copy_(y if module.shift is None else y + module.shift)

    def final_norms(self) -> Iterator[tuple[int, int, Tensor]]:
        """As `norms`, over the sampled rows."""
        return ((first, end, own.norms[FINAL_NORM]) for first, end, own in self._samples if FINAL_NORM in own.norms)

    def change_logits(self, x: Tensor, logits: Tensor) -> None:
        """logits [P, V] float32 in place, from the normalised sampled rows x [P, H]."""
        for first, end, own in self._samples:
            rows, out = x[first:end], logits[first:end]
            if own.head is not None:
                out.copy_(self._product(rows, own.head))
            if own.head_tokens is not None:
                out[:, own.head_tokens.ids] = self._product(rows, own.head_tokens.rows).float()
            if own.head_delta is not None:
                a, b = own.head_delta
                out += self._product(self._product(rows, a), b.T.contiguous())
