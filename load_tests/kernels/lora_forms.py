"""One linear module's LoRA deltas, computed in every way worth comparing: our kernels and the usual ones without them.

Every form gets the same values of several layers in its best layout, prepared before the clock runs: rank rows for
ours, tables padded to the largest rank for `bmm`, modules for PEFT. Rows of one adapter are neighbours, as the engine's
scheduler leaves them. `check` compares a form with float64; forms that fail are not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from app.kernels.bgmv import triton as bgmv
from app.kernels.lora_rows import RankRows
from app.kernels.sgmv import triton as sgmv

#: ‖out - ref‖ / ‖ref‖ that a form must stay below.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}

#: Layers take turns over at least this many bytes.
_COLD_BYTES = 256 << 20
_MAX_LAYERS = 32

#: A step of at most this many rows counts as decoding, a larger one as a prefill.
MAX_DECODE_ROWS = 256

#: A form adds the deltas of layer `layer` to y [T, d_out] in place.
Form = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Sizes:
    """One cell of the grid. ranks: of adapters 1, 2, …, in turns. num_adapters: in the batch, at most num_rows."""

    depth: int
    width: int
    ranks: tuple[int, ...]
    num_rows: int
    num_adapters: int

    @property
    def name(self) -> str:
        rank = "/".join(map(str, self.ranks))
        return f"{self.depth} to {self.width}, r {rank}, {self.num_rows} rows, {self.num_adapters} adapters"

    @property
    def rank_rows(self) -> int:
        """Rank rows that the batch reads."""
        return sum(self.ranks[i % len(self.ranks)] for i in range(self.num_adapters))

    def num_bytes(self, itemsize: int) -> int:
        """The least that has to move: each rank row once, x once, y in and out."""
        return itemsize * (self.rank_rows * (self.depth + self.width) + self.num_rows * (self.depth + 2 * self.width))

    @property
    def num_operations(self) -> int:
        per_row = [self.ranks[i * self.num_adapters // self.num_rows % len(self.ranks)] for i in range(self.num_rows)]
        return 2 * sum(per_row) * (self.depth + self.width)


class Workload:
    """Random rows and rank rows of `num_layers` layers: what one layer reads has left the cache by its next turn.

    a: [L, 1, R, d_in], b: [L, R, d_out], x: [L, T, d_in], y: [L, T, d_out]; slots: [T], in order.
    """

    def __init__(self, sizes: Sizes, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.num_layers = sizes, num_layers
        ranks = [0, *(sizes.ranks[i % len(sizes.ranks)] for i in range(sizes.num_adapters))]
        padded = [-(-rank // 16) * 16 for rank in ranks]
        starts = np.cumsum([0, *padded])
        self.ranks, self.starts = np.array(ranks, np.int32), starts[:-1].astype(np.int32)
        num_rank_rows, depth, width, num_rows = int(starts[-1]), sizes.depth, sizes.width, sizes.num_rows

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float32, device=device)

        def integers(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        scale, numbers = max(sizes.ranks) ** -0.5, num_rank_rows * depth
        self.memory = torch.empty(num_layers, numbers + num_rank_rows * width, dtype=dtype, device=device)
        self.a = self.memory[:, :numbers].view(num_layers, 1, num_rank_rows, depth)
        self.b = self.memory[:, numbers:].view(num_layers, num_rank_rows, width)
        for layer in range(num_layers):
            self.a[layer] = normal(1, num_rank_rows, depth) / depth**0.5
            self.b[layer] = normal(num_rank_rows, width) * scale
        self.x = torch.stack([normal(num_rows, depth).to(dtype) for _ in range(num_layers)])
        self.y = torch.stack([normal(num_rows, width).to(dtype) for _ in range(num_layers)])
        self.slots = 1 + np.arange(num_rows) * sizes.num_adapters // num_rows
        self.on_device = integers(self.slots.astype(np.int32))
        starts = starts[:-1, None].astype(np.int64)
        places = integers(starts * depth), integers(numbers + starts * width), integers(self.ranks[:, None])
        self.rows = [RankRows(memory, *places, depth, (width,)) for memory in self.memory]

    @property
    def groups(self) -> list[tuple[slice, slice]]:
        """(rows of the batch, rank rows) of every adapter in it."""
        found = []
        for adapter in np.unique(self.slots).tolist():
            rows = np.flatnonzero(self.slots == adapter)
            start = int(self.starts[adapter])
            found.append((slice(int(rows[0]), int(rows[-1]) + 1), slice(start, start + int(self.ranks[adapter]))))
        return found

    def expected_output(self, layer: int) -> torch.Tensor:
        """y + delta in float64, by the definition."""
        out = self.y[layer].double()
        for rows, ranks in self.groups:
            out[rows] += (self.x[layer, rows].double() @ self.a[layer, 0, ranks].double().T) @ self.b[
                layer, ranks
            ].double()
        return out


def cold_layers(sizes: Sizes) -> int:
    """How many layers read more than a cache holds between them (an H200's holds 60 MB), within reason."""
    return max(1, min(_MAX_LAYERS, -(-_COLD_BYTES // sizes.num_bytes(2))))


def num_segments(sizes: Sizes, block_tokens: int) -> int:
    """Segments as in the engine: a decode step's CUDA graph has room for a different adapter per row."""
    num_runs = sizes.num_rows if sizes.num_rows <= MAX_DECODE_ROWS else sizes.num_adapters
    return sgmv.max_segments(sizes.num_rows, num_runs, block_tokens)


def all_layers(form: Form, workload: Workload, num_layers: int) -> None:
    """One after the other, as in a model's step."""
    for layer in range(num_layers):
        form(layer, workload.y[layer])


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out - expected‖ / ‖expected‖, infinite if anything is not finite."""
    if not torch.isfinite(out).all():
        return float("inf")
    return float(torch.linalg.vector_norm(out.double() - expected) / torch.linalg.vector_norm(expected))


def check(workload: Workload, form: Form) -> float:
    """The relative error of the first layer."""
    out = workload.y[0].clone()
    form(0, out)
    return relative_error(out, workload.expected_output(0))


def _bgmv(w: Workload, config: bgmv.Configuration | None = None) -> Form:
    max_rank = max(w.sizes.ranks)
    return lambda layer, y: bgmv.add_lora(w.x[layer], y, w.rows[layer], w.on_device, max_rank=max_rank, config=config)


def _sgmv(w: Workload, config: sgmv.Configuration | None = None, *, batch_invariant: bool = False) -> Form:
    cut = sgmv.block_tokens(w.sizes.num_rows, batch_invariant=batch_invariant)
    adapters = np.unique(w.slots)
    run_starts = np.searchsorted(w.slots, [*adapters, adapters[-1] + 1])
    found = sgmv.segments(run_starts, adapters, cut)
    padded = np.zeros((num_segments(w.sizes, cut), 3), np.int32)
    padded[: len(found)] = found
    segments = torch.from_numpy(padded).to(w.x.device)
    max_rank = max(w.sizes.ranks)
    return lambda layer, y: sgmv.add_lora(
        w.x[layer], y, w.rows[layer], segments, max_rank=max_rank, block_tokens=cut, batch_invariant=batch_invariant,
        config=config,
    )  # fmt: skip


def _loop(w: Workload) -> Form:
    """(a) One pair of products per adapter."""
    groups = w.groups

    def add(layer: int, y: torch.Tensor) -> None:
        for rows, ranks in groups:
            y[rows].addmm_(w.x[layer, rows] @ w.a[layer, 0, ranks].T, w.b[layer, ranks])

    return add


def _padded_tables(w: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """a [L, S, d_in, r], b [L, S, r, d_out] for the adapters in the batch, r the largest rank."""
    largest, adapters = max(w.sizes.ranks), np.unique(w.slots)
    a = w.a.new_zeros((w.num_layers, len(adapters), w.sizes.depth, largest))
    b = w.b.new_zeros((w.num_layers, len(adapters), largest, w.sizes.width))
    for i, (_, ranks) in enumerate(w.groups):
        count = ranks.stop - ranks.start
        a[:, i, :, :count] = w.a[:, 0, ranks].transpose(1, 2)
        b[:, i, :count] = w.b[:, ranks]
    return a, b


def _gather(w: Workload) -> Form:
    """(b) Every row's own copy of its adapter, then one batched product (Chen et al. 2023 name it Gather-BMM)."""
    a, b = _padded_tables(w)
    index = torch.from_numpy(np.unique(w.slots, return_inverse=True)[1].astype(np.int64)).to(w.x.device)

    def add(layer: int, y: torch.Tensor) -> None:
        y += torch.bmm(torch.bmm(w.x[layer][:, None], a[layer][index]), b[layer][index])[:, 0]

    return add


def _pad_and_multiply(w: Workload) -> Form:
    """(c) The rows of every adapter padded to the most rows any has, then one batched product."""
    a, b = _padded_tables(w)
    groups = w.groups
    most = max(rows.stop - rows.start for rows, _ in groups)
    place = np.concatenate([i * most + np.arange(rows.stop - rows.start) for i, (rows, _) in enumerate(groups)])
    at = torch.from_numpy(place.astype(np.int64)).to(w.x.device)
    padded = w.x.new_zeros((len(groups) * most, w.sizes.depth))

    def add(layer: int, y: torch.Tensor) -> None:
        padded.index_copy_(0, at, w.x[layer])
        delta = torch.bmm(torch.bmm(padded.view(len(groups), most, -1), a[layer]), b[layer])
        y += delta.view(len(groups) * most, -1)[at]

    return add


def peft(w: Workload) -> tuple[Form, torch.nn.Module]:
    """(d) PEFT's mixed batch on the first layer, base product included; and the base layer alone.

    The form writes y instead of adding to it: y has to be the base product.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    model = torch.nn.Sequential()
    model.add_module("proj", torch.nn.Linear(w.sizes.depth, w.sizes.width, bias=False).to(w.x.device, w.x.dtype))
    wrapped = None
    for i, (_, ranks) in enumerate(w.groups):
        rank = ranks.stop - ranks.start
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["proj"])
        if wrapped is None:
            wrapped = get_peft_model(model, config, adapter_name="0", autocast_adapter_dtype=False)
        else:
            wrapped.add_adapter(str(i), config, autocast_adapter_dtype=False)
    assert wrapped is not None
    wrapped.to(w.x.device, w.x.dtype).eval().requires_grad_(False)
    layer = wrapped.get_submodule("base_model.model.proj")
    assert isinstance(layer, Linear)
    for i, (_, ranks) in enumerate(w.groups):
        layer.lora_A[str(i)].get_parameter("weight").data.copy_(w.a[0, 0, ranks])
        layer.lora_B[str(i)].get_parameter("weight").data.copy_(w.b[0, ranks].T)
    names = [str(i) for i in np.unique(w.slots, return_inverse=True)[1].tolist()]

    def add(_layer: int, y: torch.Tensor) -> None:
        y.copy_(layer(w.x[0], adapter_names=names))

    return add, layer.base_layer


#: Name → what builds the form; building lays out its tables. The first three are ours.
FORMS: dict[str, Callable[..., Form]] = {
    "bgmv": _bgmv,
    "sgmv": _sgmv,
    "deterministic": partial(_sgmv, batch_invariant=True),
    "loop": _loop,
    "gather+bmm": _gather,
    "padded bmm": _pad_and_multiply,
}
