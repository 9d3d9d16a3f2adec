"""Adapters' LoRA rows of experts on the devices, in pages: an adapter takes as many as its experts' ranks need.

A page has room for eight rank rows of one expert of one layer, for each of its modules. An expert's pages form a linked
list, so any free page will do and nothing is ever moved; page `num_pages` belongs to no adapter and ends every list.
The engine bounds the memory (`extra_bytes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraPair, to_float32
from app.engine.adapters.extra_weights import expert_bytes
from app.engine.errors import AdapterMismatch
from app.engine.models.linear_modules import LinearModule, linear_module_of
from app.engine.models.sharding import shard_columns
from app.engine.xla.arrays import TENSOR_AXIS, ExpertPages, ExpertPageTables, Floats
from app.engine.xla.sizes import XlaSizes
from app.kernels.sgmv.xla import RANK_CHUNK

#: Pages that one call of `write_pages` writes.
PAGES_AT_ONCE = 32


class XlaMoeLoraTables:
    """Page allocation of a model; without experts or room there are no pages."""

    def __init__(self, sizes: XlaSizes, num_slots: int, max_bytes: int) -> None:
        self._sizes = sizes
        self._modules = tuple(one for one in sizes.modules if one.num_experts is not None)
        self._columns = {
            one.name: shard_columns(one, sizes.tensor_shards) for one in sizes.whole if one.num_experts is not None
        }
        widths = [width for table in self.shapes(1) for _, width in table.values()]
        #: Bytes of a page, over all devices that share an expert's columns.
        self.page_bytes = 4 * RANK_CHUNK * sum(widths)
        self.num_pages = max_bytes // self.page_bytes if self._modules else 0
        self._free = list(range(self.num_pages))
        self._pages_of: dict[int, list[int]] = {}
        self._longest = np.zeros(num_slots, np.int32)
        layers = len(sizes.layers_of("experts_down"))
        num_experts = sizes.experts_per_shard * sizes.expert_shards
        self._first_pages = np.full((layers, num_experts, num_slots), self.num_pages, np.int32)
        self._next_pages = np.full(self.num_pages + 1, self.num_pages, np.int32)
        self._ranks = {one.name: np.zeros((self.num_pages + 1, len(one.targets)), np.int32) for one in self._modules}

    def check(self, adapter: LoraAdapter) -> None:
        """Raises AdapterMismatch for deltas of experts if there is no room for any."""
        if not self.num_pages and _by_expert(adapter):
            raise AdapterMismatch(
                "the xla engine has no room for deltas of experts: a page of eight rank rows takes "
                f"{self.page_bytes} bytes; raise engine.extra_weights_bytes"
            )

    def extra_bytes(self, adapter: LoraAdapter) -> int:
        """Bytes of an adapter's extra weights, its pages included."""
        others = adapter.card.extra_bytes - expert_bytes(adapter, self._sizes.spec)
        return others + self.page_bytes * sum(_num_pages(pairs.values()) for pairs in _by_expert(adapter).values())

    def shapes(self, num_pages: int) -> ExpertPages:
        """The shape of each table with `num_pages` pages."""
        a, b = {}, {}
        for module in self._modules:
            is_input, shards = module.kind.split == "input", self._sizes.tensor_shards
            for target, width in zip(module.targets, module.widths, strict=True):
                a[target] = (num_pages * RANK_CHUNK, module.d_in * (shards if is_input else 1))
                b[target] = (num_pages * RANK_CHUNK, width * (1 if is_input else shards))
        return ExpertPages(a, b)

    def specs(self) -> ExpertPages:
        """PartitionSpecs: like other modules' rows, but over the devices that share an expert; each device has all
        pages.
        """
        split, a, b = P(None, TENSOR_AXIS), {}, {}
        for module in self._modules:
            for target in module.targets:
                a[target], b[target] = (split, P()) if module.kind.split == "input" else (P(), split)
        return ExpertPages(a, b)

    def write(self, adapter_slot: int, adapter: LoraAdapter) -> Iterator[tuple[ExpertPages, NDArray[np.int32]]]:
        """Assign pages to the slot's adapter and yield their contents and numbers, `PAGES_AT_ONCE` at a time."""
        self.release(adapter_slot)
        own_pages = self._pages_of[adapter_slot] = []
        filled: list[tuple[int, dict[str, LoraPair]]] = []
        for (layer, expert), pairs in _by_expert(adapter).items():
            stacked_layer, count = self._sizes.stacked_layer("experts_down", layer), _num_pages(pairs.values())
            mine = [self._free.pop() for _ in range(count)]
            own_pages += mine
            self._first_pages[stacked_layer, expert, adapter_slot] = mine[0]
            self._next_pages[mine] = [*mine[1:], self.num_pages]
            self._longest[adapter_slot] = max(self._longest[adapter_slot], count)
            for number, page in enumerate(mine):
                rows = slice(number * RANK_CHUNK, (number + 1) * RANK_CHUNK)
                part = {target: LoraPair(pair.a[rows], pair.b[rows]) for target, pair in pairs.items()}
                part = {target: pair for target, pair in part.items() if pair.rank}
                for target, pair in part.items():
                    module = linear_module_of(self._modules, target)
                    self._ranks[module.name][page, module.targets.index(target)] = pair.rank
                filled.append((page, part))
        for first in range(0, len(filled), PAGES_AT_ONCE):
            yield self._pack(filled[first : first + PAGES_AT_ONCE])

    def release(self, adapter_slot: int) -> None:
        """Free the slot's pages."""
        pages = self._pages_of.pop(adapter_slot, [])
        self._free += pages
        self._first_pages[:, :, adapter_slot] = self.num_pages
        self._longest[adapter_slot] = 0
        for ranks in self._ranks.values():
            ranks[pages] = 0

    def longest(self, adapter_slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Length of the longest page list of each slot; 0 for an adapter that changes no expert."""
        return self._longest[adapter_slots]

    def places(self) -> ExpertPageTables | None:
        """The page lists as the programs' argument, copied."""
        if not self.num_pages:
            return None
        first_pages = self._first_pages.reshape(len(self._first_pages), -1)
        return ExpertPageTables(
            first_pages.copy(), self._next_pages.copy(), {name: each.copy() for name, each in self._ranks.items()}
        )

    def _pack(self, filled: list[tuple[int, dict[str, LoraPair]]]) -> tuple[ExpertPages, NDArray[np.int32]]:
        """Pages and their numbers; unused entries get the number past the last page."""
        shapes = self.shapes(PAGES_AT_ONCE)
        a, b = ({name: np.zeros(shape, np.float32) for name, shape in table.items()} for table in shapes)
        pages = np.full(PAGES_AT_ONCE, self.num_pages, np.int32)
        for index, (page, pairs) in enumerate(filled):
            pages[index] = page
            rows = slice(index * RANK_CHUNK, (index + 1) * RANK_CHUNK)
            for target, pair in pairs.items():
                module = linear_module_of(self._modules, target)
                a[target][rows], b[target][rows] = self._page(module, target, pair)
        return ExpertPages(a, b), pages

    def _page(self, module: LinearModule, target: str, pair: LoraPair) -> tuple[Floats, Floats]:
        """Eight rows of a and of b, shards one after the other."""
        is_input, wide_a, wide_b = module.kind.split == "input", to_float32(pair.a), to_float32(pair.b)
        of_a, of_b = [], []
        for columns in self._columns[module.name][target]:
            of_a.append(_eight_rows(wide_a[:, columns] if is_input else wide_a))
            of_b.append(_eight_rows(wide_b if is_input else wide_b[:, columns]))
        if is_input:
            return np.concatenate(of_a, axis=1), of_b[0]
        return of_a[0], np.concatenate(of_b, axis=1)


def write_pages(tables: ExpertPages, rows: ExpertPages, pages: Array) -> ExpertPages:
    """The tables with these pages written, in place because donated. Writes beyond the last page are dropped."""
    at = (pages[:, None] * RANK_CHUNK + np.arange(RANK_CHUNK, dtype=np.int32)).reshape(-1)

    def update(table: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
        return {name: table[name].at[at].set(new[name], mode="drop") for name in table}

    return ExpertPages(update(tables.a, rows.a), update(tables.b, rows.b))


def _by_expert(adapter: LoraAdapter) -> dict[tuple[int, int], dict[str, LoraPair]]:
    """(layer, expert) -> the adapter's LoRA pairs by target."""
    found: dict[tuple[int, int], dict[str, LoraPair]] = defaultdict(dict)
    for key, pair in adapter.weights.items():
        if key.expert is not None:
            found[key.layer, key.expert][key.target] = pair
    return found


def _num_pages(pairs: Iterable[LoraPair]) -> int:
    return -(-max(pair.rank for pair in pairs) // RANK_CHUNK)


def _eight_rows(rows: Floats) -> Floats:
    """Up to eight rows, and zeros after them."""
    whole = np.zeros((RANK_CHUNK, rows.shape[1]), np.float32)
    whole[: len(rows)] = rows
    return whole
