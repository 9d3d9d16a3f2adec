"""Two tenants that wait for one adapter, one of them for another adapter, too: that one gets less of the first.

Where each adapter has a replica to itself, it owes at the first what it is served at the second. Where placement has
shared them among both replicas, half of each is the other tenant's. First come, first served, both of them would be
served as many requests of the first adapter.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import openai
import pytest

from tests.e2e.tenants.conftest import PLACES, Keyed
from tests.e2e.tenants.test_tenants import client, new_project

#: Answers of the first seconds, before the tenants wait for each other, are not counted; then at least so many are.
SETTLING_S, COUNTING_S, MIN_ANSWERS = 8.0, 20.0, 150
#: Long answers, or the client of so many streams keeps the replicas waiting, and nobody waits for a place.
NUM_TOKENS = 800


@pytest.mark.nightly
async def test_who_is_served_more_elsewhere_is_served_less_where_both_wait(keyed: Keyed) -> None:
    async with client(keyed) as administering:
        both, one = [await new_project(administering, name) for name in ("both", "one")]
        # As many requests of either adapter, or placement would share the busier one from the beginning.
        floods = [(both, "r1"), (both, "r16"), (both, "r16"), (one, "r1")]
        answered: Counter[tuple[str, str]] = Counter()
        over = asyncio.Event()
        counted_from_s = time.monotonic() + SETTLING_S

        async def ask(asking: openai.AsyncOpenAI, project_id: str, model: str) -> None:
            while not over.is_set():
                await asking.completions.create(
                    model=model, prompt="hello there", max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
                )
                if time.monotonic() > counted_from_s and not over.is_set():
                    answered[project_id, model] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(4 * PLACES):  # so many that the smaller always waits at both, too
                for project, model in floods:
                    group.create_task(ask(administering.with_options(api_key=project.key), project.id, model))
            await asyncio.sleep(SETTLING_S + COUNTING_S)
            while answered.total() < MIN_ANSWERS:  # a busy machine needs longer
                await asyncio.sleep(1.0)
            over.set()
    assert answered[one.id, "r1"] > 1.5 * answered[both.id, "r1"] > 0, answered
