"""What a tenant can learn of another's prompts from the work that its own requests take: nothing.

Time follows work, so work is compared, which no machine disturbs: the tokens that are computed in each step for a
probe, where another tenant has just sent the same prompt, and where it has sent another one of the same length.
"""

from __future__ import annotations

import random

import pytest

from app.engine.request import SamplingParams
from tests.engine.driving import make_engine
from tests.fakes import VOCAB, fake_adapter, fake_request

NUM_TRIALS, LENGTH = 100, 33
ADAPTER = fake_adapter("public", 8)


def work(victim: list[int], probe: list[int], *, same_tenant: bool, with_adapter: bool) -> tuple[int, ...]:
    """Tokens computed in each step while the probe runs."""
    engine, _ = make_engine(num_kv_blocks=64, rows=32)
    adapter = ADAPTER if with_adapter else None
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for name, prompt, tenant in (("v", victim, "victim"), ("p", probe, "victim" if same_tenant else "prober")):
        salt = tenant.encode()
        engine.submit(
            fake_request(name, prompt, adapter, sampling=sampling, tenant_id=tenant, cache_salt=salt), adapter
        )
        steps, before = [], engine.stats().num_tokens_computed
        while engine.has_work:
            engine.step()
            now = engine.stats().num_tokens_computed
            steps.append(now - before)
            before = now
    return tuple(steps)


def auc(positive: list[int], negative: list[int]) -> float:
    """How well a threshold tells the two apart: 0.5 not at all, 1 always (Mann-Whitney)."""
    pairs = [(p, n) for p in positive for n in negative]
    return sum((p < n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_another_tenant_s_prefix_cannot_be_told(with_adapter: bool) -> None:
    rng = random.Random(7)
    hits, misses, own = [], [], []
    for _ in range(NUM_TRIALS):
        secret, other = ([rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(2))
        hits.append(work(secret, secret, same_tenant=False, with_adapter=with_adapter))
        misses.append(work(other, secret, same_tenant=False, with_adapter=with_adapter))
        own.append(work(secret, secret, same_tenant=True, with_adapter=with_adapter))
    assert hits == misses
    assert auc(list(map(sum, hits)), list(map(sum, misses))) == 0.5
    assert auc(list(map(sum, own)), list(map(sum, misses))) == 1.0, "the probe finds what is there to be found"
