"""Tenants of a service of two ingresses and two engine replicas: the official client, one limit, one ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from app.config import ADMIN_KEY
from app.deployments.tenants.key_material import new_key
from tests.e2e.service.conftest import ENGINES, Service, running_service

KEY = new_key(is_admin=True).value

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tenants")
    with running_service(folder, ENGINES["cpu"], num_replicas=2, environment={ADMIN_KEY: KEY}) as started:
        yield started


def client(service: Service, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key=api_key, admin_api_key=KEY, max_retries=0, timeout=600
    )


async def test_a_thousand_first_requests_over_two_ingresses_admit_ten_and_the_ledger_agrees(keyed: Service) -> None:
    assert httpx.get(f"{keyed.url}/v1/models").status_code == 401
    started = int(time.time())
    async with client(keyed) as administering:
        admin = administering.admin.organization
        project = await admin.projects.create(name="acme")
        account = await admin.projects.service_accounts.create(project.id, name="app")
        assert account.api_key is not None
        limits = admin.projects.rate_limits
        await limits.update_rate_limit("rl-tiny", project_id=project.id, max_requests_per_1_day=10)
        usage = await _ask_a_thousand_times(keyed, account.api_key.value)
        assert len(usage) == 10
        names = ("num_model_requests", "input_tokens", "output_tokens")
        used = [10, sum(prompt for prompt, _ in usage), sum(completion for _, completion in usage)]
        total: list[int] = []
        deadline_s = time.monotonic() + 300
        while total != used and time.monotonic() < deadline_s:  # the other ingress and the replicas write soon
            page = await admin.usage.completions(start_time=started, bucket_width="1m", project_ids=[project.id])
            results = [result for bucket in page.data for result in bucket.results]
            total = [sum(getattr(each, name) for each in results) for name in names]
            await asyncio.sleep(0.2)
    assert total == used


async def _ask_a_thousand_times(service: Service, api_key: str) -> list[tuple[int, int]]:
    """Tokens of the prompts and of the answers that were admitted; the others were 429s that say when to come back."""
    turns = asyncio.Semaphore(200)
    async with client(service, api_key) as asking:

        async def ask() -> tuple[int, int] | None:
            async with turns:
                try:
                    answer = await asking.completions.create(model="tiny", prompt="hello there", max_tokens=4)
                except openai.RateLimitError as error:
                    return None if "retry-after-ms" in error.response.headers else (-1, -1)
                assert answer.usage is not None
                return answer.usage.prompt_tokens, answer.usage.completion_tokens

        answers = await asyncio.gather(*(ask() for _ in range(1000)))
    return [answer for answer in answers if answer is not None]
