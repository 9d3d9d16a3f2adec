"""Adapters' extra weights on a device: everything besides rank rows, applied run by run.

The base's operation is done for the whole batch; then `ExtraRows` changes the rows of the step's adapters that have
extra weights. Other rows are not touched, and steps without such rows skip all of this.
`app.kernels.extra_weights.reference` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair, to_float32
from app.engine.adapters.extra_weights import MODULE_KINDS, ExtraWeight, extra_weights
from app.engine.cuda.weights import Weights, to_tensor
from app.engine.models.linear_modules import LinearModule, linear_module_of, shared_table_modules, stacked_modules
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import LATENT_NORMS, LAYER_NORMS, LatentNorm, LayerNorm

#: x [T, d_in], weight [d_out, d_in] -> [T, d_out]: the decoder's own product.
Multiply = Callable[[Tensor, Tensor], Tensor]
#: An adapter's parts, by kind, layer and target as in `ExtraWeight`.
Parts = Mapping[tuple[str, int | None, str | None], Tensor]

#: Parts that stay in float32 whatever the weights' type is.
_FLOAT32 = {"scale", "shift", "final_norm", *LAYER_NORMS, *LATENT_NORMS}


class CudaExtras:
    """Extra weights by adapter slot."""

    def __init__(self, spec: ModelSpec, weights: Weights, dora_scale: Callable[..., Tensor]) -> None:
        """dora_scale: see `app.kernels.dora.torch`."""
        self._spec, self._dora_scale = spec, dora_scale
        self._modules = shared_table_modules(stacked_modules(spec))
        self._weights = weights
        self._parts: dict[int, Parts] = {}
        self._device, self._dtype = weights.embedding.device, weights.embedding.dtype

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> None:
        """Copy the adapter's parts to the slot, replacing what was there."""
        self.release(adapter_slot)
        parts: dict[tuple[str, int | None, str | None], Tensor] = {}
        for part in extra_weights(adapter, self._spec, self):
            parts[part.kind, part.layer, part.target] = self._tensor(part)
        if parts:
            self._parts[adapter_slot] = parts

    def release(self, adapter_slot: int) -> None:
        """Drop the slot's parts."""
        self._parts.pop(adapter_slot, None)

    def runs(self, run_starts: NDArray[np.int32], run_adapter_slots: NDArray[np.int32]) -> list[tuple[int, int, Parts]]:
        """(first row, end, parts) of the runs whose adapter has extra weights."""
        if not self._parts:
            return []
        bounds = zip(run_starts[:-1].tolist(), run_starts[1:].tolist(), run_adapter_slots.tolist(), strict=True)
        return [(first, end, self._parts[slot]) for first, end, slot in bounds if slot in self._parts]

    def dora_scale(self, key: LoraKey, magnitude: NDArray[np.float32], pair: LoraPair) -> NDArray[np.float32]:
        """See `BaseWeights.dora_scale`."""
        module = linear_module_of(self._modules, key.target)
        weight = self._weights.layers[key.layer].modules[module.name][module.columns(key.target)]
        operands = (
            to_tensor(values).to(self._device) for values in (magnitude, to_float32(pair.a), to_float32(pair.b))
        )
        magnitude_, a, b = operands
        scale: NDArray[np.float32] = self._dora_scale(magnitude_, weight, a, b).cpu().numpy()
        return scale

    def bias(self, key: LoraKey) -> NDArray[np.float32] | None:
        """See `BaseWeights.bias`."""
        module = linear_module_of(self._modules, key.target)
        bias = self._weights.layers[key.layer].biases.get(module.name)
        return None if bias is None else bias[module.columns(key.target)].float().cpu().numpy()

    def _tensor(self, part: ExtraWeight) -> Tensor:
        """A copy on the device that never shares the adapter's own memory."""
        values = to_tensor(part.values)
        if part.kind in _FLOAT32 or values.dtype == torch.int64:
            return values.to(self._device, copy=True)
        return values.to(self._device, self._dtype, copy=True)


class ExtraRows:
    """The rows of one step whose adapters have extra weights."""

    def __init__(
        self,
        runs: list[tuple[int, int, Parts]],
        sample_rows: NDArray[np.int32],
        modules: Iterable[LinearModule],
        multiply: Multiply,
    ) -> None:
        """`runs` index the step's tokens; `sample_rows`: [P] ascending; `modules`: those of all layers."""
        self._runs = runs
        self._modules = {one.name: one for one in modules}
        self._multiply = multiply
        bounds = [np.searchsorted(sample_rows, run[:2]).tolist() for run in runs]
        self._samples = [(first, end, run[2]) for (first, end), run in zip(bounds, runs, strict=True) if first < end]

    def embed(self, token_ids: Tensor, hidden: Tensor) -> None:
        """Change hidden [T, H] in place, right after the lookup."""
        for first, end, parts in self._runs:
            ids, out = token_ids[first:end].long(), hidden[first:end]
            rows, own_ids = parts.get(("embed_rows", None, None)), parts.get(("embed_ids", None, None))
            if rows is not None and own_ids is not None:
                places = torch.searchsorted(own_ids, ids).clamp(max=len(own_ids) - 1)
                out.copy_(torch.where((own_ids[places] == ids)[:, None], rows[places], out))
            elif rows is not None:
                out.copy_(rows[ids])
            if ("embed_a", None, None) in parts:
                a, b = parts["embed_a", None, None], parts["embed_b", None, None]
                out += self._multiply(a[ids], b.T.contiguous())

    def norms(self, layer: int, kind: LayerNorm | LatentNorm) -> Iterator[tuple[int, int, Tensor]]:
        """Runs (first row, end, weight) whose adapter has its own norm in a layer."""
        place = kind, layer, None
        return ((first, end, parts[place]) for first, end, parts in self._runs if place in parts)

    def head_norms(
        self, layer: int, num_tokens: int, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> list[tuple[int, int, Tensor | None, Tensor | None]]:
        """All rows cut into pieces (first row, end, q norm, k norm) with one pair of norms each."""
        q_place, k_place = ("q_norm", layer, None), ("k_norm", layer, None)
        pieces: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        at = 0
        for first, end, parts in self._runs:
            if q_place not in parts and k_place not in parts:
                continue
            if at < first:
                pieces.append((at, first, q_norm, k_norm))
            pieces.append((first, end, parts.get(q_place, q_norm), parts.get(k_place, k_norm)))
            at = end
        if at < num_tokens:
            pieces.append((at, num_tokens, q_norm, k_norm))
        return pieces

    def save_rows(self, layer: int, module: str, out: Tensor) -> list[tuple[int, int, Tensor]]:
        """Copy and zero rows whose adapters scale or replace the product added to them; see `restore_rows`."""
        saved = []
        places = [(kind, layer, target) for kind in MODULE_KINDS for target in self._modules[module].targets]
        for first, end, parts in self._runs:
            if any(place in parts for place in places):
                saved.append((first, end, out[first:end].clone()))
                out[first:end] = 0
        return saved

    def restore_rows(self, saved: list[tuple[int, int, Tensor]], out: Tensor) -> None:
        """Add back the rows that `save_rows` copied."""
        for first, end, rows in saved:
            out[first:end] += rows

    def change(self, layer: int, module: str, x: Tensor, out: Tensor) -> None:
        """Apply weights, scales and shifts in place: out [T, W] holds the base product with the deltas."""
        for first, end, parts in self._runs:
            for target in self._modules[module].targets:
                weight, scale, shift = (parts.get((kind, layer, target)) for kind in MODULE_KINDS)
                if weight is scale is shift is None:
                    continue
                columns = self._modules[module].columns(target)
                y = out[first:end, columns].float()
                if weight is not None:
                    y = self._multiply(x[first:end], weight).float()
                y = y if scale is None else y * scale
                out[first:end, columns] = y if shift is None else y + shift

    def final_norms(self) -> Iterator[tuple[int, int, Tensor]]:
        """Runs of sampled rows (first row, end, weight) whose adapter has its own final norm."""
        place = "final_norm", None, None
        return ((first, end, parts[place]) for first, end, parts in self._samples if place in parts)

    def change_logits(self, x: Tensor, logits: Tensor) -> None:
        """Change logits [P, V] float32 in place, given the normalised sampled rows x [P, H]."""
        for first, end, parts in self._samples:
            rows, out = x[first:end], logits[first:end]
            if ("head_weight", None, None) in parts:
                out.copy_(self._multiply(rows, parts["head_weight", None, None]))
            if ("head_ids", None, None) in parts:
                out[:, parts["head_ids", None, None]] = self._multiply(rows, parts["head_rows", None, None]).float()
            if ("head_a", None, None) in parts:
                shrunk = self._multiply(rows, parts["head_a", None, None])
                out += self._multiply(shrunk, parts["head_b", None, None].T.contiguous())
