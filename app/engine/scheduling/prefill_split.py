"""How one step's prefill tokens are divided among prompts that are being computed.

In: prompts in order of age and a token budget. Out: a number of tokens for each. Rule: a long
prompt delays others by a bounded factor: tenants with prompts to compute, running or waiting, get
equal shares, and a tenant's oldest prompt takes at most half of its tenant's share while others of
the tenant want some. What is left after admission goes to the oldest.
"""

from __future__ import annotations

from collections.abc import Set

from app.engine.sequence import Sequence

#: A smaller share wastes more on starting a chunk than it gains in fairness.
MIN_SHARE = 16


def split_prefill(prefills: list[Sequence], budget: int, waiting_tenants: Set[str]) -> list[int]:
    """Tokens per prompt, adding up to at most `budget`; the rest is for waiting requests first."""
    counts = [0] * len(prefills)
    by_tenant: dict[str, list[int]] = {}
    for index, sequence in enumerate(prefills):
        by_tenant.setdefault(sequence.tenant_id, []).append(index)
    share = max(budget // max(1, len(by_tenant.keys() | waiting_tenants)), MIN_SHARE)
    for tenant_id, indices in by_tenant.items():
        left = min(share, budget)
        others = len(indices) > 1 or tenant_id in waiting_tenants
        for rank, index in enumerate(indices):
            cap = -(-left // 2) if rank == 0 and others else left
            counts[index] = min(prefills[index].num_pending, cap)
            left -= counts[index]
            budget -= counts[index]
    return counts


def spend_rest(prefills: list[Sequence], counts: list[int], budget: int) -> None:
    """Give what is left to the oldest first; `counts` is written in place."""
    for index, sequence in enumerate(prefills):
        if budget <= 0:
            return
        more = min(sequence.num_pending - counts[index], budget)
        counts[index] += more
        budget -= more
