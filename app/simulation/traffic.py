"""The traffic of a simulated fleet: requests with times, adapters and lengths, and adapters with ranks.

It contains everything random about the requests, so the same traffic can be given to different fleets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.engine.pools.block_pool import PREFIX_KEY_BYTES
from app.simulation.trace import TraceEntry

#: The adapter index of requests for the base model.
BASE = -1
#: Parts of the adapter requests that hot adapters get, and that warm ones get in addition.
HOT_PART, WARM_PART = 0.5, 0.4


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """N requests in order of arrival, for A adapters.

    arrival_s [N] float64; adapter [N] int64, an index below A or `BASE`; prompt_tokens, output_tokens [N] int64, at
    least 1; tenant [N] int64; rank [A] int64. `weights`: fair weights by tenant index, 1 by default. prefix [N] int64:
    which of H shared prefixes a prompt begins with, or -1; prefix_tokens [H] int64: its length, less than any such
    prompt. Without them no prompt shares a prefix.
    """

    arrival_s: NDArray[np.float64]
    adapter: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    tenant: NDArray[np.int64]
    rank: NDArray[np.int64]
    weights: dict[int, float] = field(default_factory=dict)
    prefix: NDArray[np.int64] | None = None
    prefix_tokens: NDArray[np.int64] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def num_adapters(self) -> int:
        return len(self.rank)

    def digests(self) -> list[str]:
        """A digest for each adapter."""
        return [hashlib.sha256(f"adapter {index}".encode()).hexdigest() for index in range(self.num_adapters)]

    def prefixes(self) -> list[tuple[bytes | None, int]]:
        """For each request its prefix, named differently per adapter and tenant, and the prefix's length; (None, 0)
        without one.
        """
        if self.prefix is None or self.prefix_tokens is None:
            return [(None, 0)] * self.num_requests
        names: dict[tuple[int, int, int], tuple[bytes | None, int]] = {}
        found = []
        for key in zip(self.prefix.tolist(), self.adapter.tolist(), self.tenant.tolist(), strict=True):
            if key not in names:
                name = hashlib.sha256(repr(key).encode()).digest()[:PREFIX_KEY_BYTES]
                names[key] = (None, 0) if key[0] < 0 else (name, int(self.prefix_tokens[key[0]]))
            found.append(names[key])
        return found

    def classes(self) -> list[str]:
        """Each adapter's class by its number of requests: "hot", "warm" or "tail"."""
        requested = self.adapter[self.adapter != BASE]
        counts = np.bincount(requested, minlength=self.num_adapters)
        names = ["tail"] * self.num_adapters
        before = 0
        for index in np.argsort(-counts, kind="stable").tolist():
            part = before / max(len(requested), 1)
            if part < HOT_PART:
                names[index] = "hot"
            elif part < HOT_PART + WARM_PART:
                names[index] = "warm"
            before += int(counts[index])
        return names


def from_trace(entries: Sequence[TraceEntry], rank: int, prompt_tokens: int, output_tokens: int) -> Traffic:
    """The requests of a trace; all adapters have `rank`, and missing lengths get the given ones."""
    models = sorted({entry.model for entry in entries if entry.model is not None})
    tenants = sorted({entry.tenant for entry in entries if entry.tenant is not None})
    model_index = {name: index for index, name in enumerate(models)}
    tenant_index = {name: index for index, name in enumerate(tenants)}
    return Traffic(
        arrival_s=np.array([entry.arrival_s for entry in entries], np.float64),
        adapter=np.array([BASE if e.model is None else model_index[e.model] for e in entries], np.int64),
        prompt_tokens=np.array([entry.prompt_tokens or prompt_tokens for entry in entries], np.int64),
        output_tokens=np.array([entry.output_tokens or output_tokens for entry in entries], np.int64),
        tenant=np.array([0 if e.tenant is None else tenant_index[e.tenant] for e in entries], np.int64),
        rank=np.full(len(models), rank, np.int64),
    )
