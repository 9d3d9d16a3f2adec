"""Tenants of a service of two ingresses and two engine replicas: the official client, one limit, one ledger."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from app.deployments.tenancy.usage.tenant_throughput import MAX_NAMED, OTHER
from tests.e2e.service.conftest import Service
from tests.e2e.tenants.conftest import KEY


def client(service: Service, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key=api_key, admin_api_key=KEY, max_retries=0, timeout=600
    )


async def test_a_thousand_first_requests_over_two_ingresses_admit_ten_and_the_ledger_agrees(keyed: Service) -> None:
    assert httpx.get(f"{keyed.url}/v1/models", timeout=60).status_code == 401
    started = int(time.time())
    log = Path(keyed.process.environment["POLYLORA_STATE_DIR"]) / "logs" / "polylora.log"
    async with client(keyed) as administering:
        admin = administering.admin.organization
        while True:  # a store that takes over a second to grant counts as lost: each ingress then admits ten
            logged = log.stat().st_size
            project = await admin.projects.create(name="acme")
            account = await admin.projects.service_accounts.create(project.id, name="app")
            assert account.api_key is not None
            limits = admin.projects.rate_limits
            await limits.update_rate_limit("rl-tiny", project_id=project.id, max_requests_per_1_day=10)
            usage = await _ask_a_thousand_times(keyed, account.api_key.value)
            if len(usage) == 10 or b"enforcing limits locally" not in log.read_bytes()[logged:]:
                break
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


async def test_gauges_of_tenants_and_refusals_are_among_the_metrics(keyed: Service) -> None:
    """More projects than are named are served until Ray has gathered what there is to say of them, and one is refused.

    Those of `much` are always the largest, so that it is settled who is named.
    """
    async with client(keyed) as administering:
        much = [await new_project(administering, f"much-{index}") for index in range(MAX_NAMED)]
        little = [await new_project(administering, f"little-{index}") for index in range(3)]
        limited = await new_project(administering, "limited")
        rates = administering.admin.organization.projects.rate_limits
        await rates.update_rate_limit("rl-tiny", project_id=limited.id, max_requests_per_1_day=1)
        await _ask(administering, limited, 1)
        for _ in range(2):
            with pytest.raises(openai.RateLimitError):
                await _ask(administering, limited, 1)
        deadline_s = time.monotonic() + 600
        while True:
            await asyncio.gather(*(_ask(administering, project, 8) for project in much))
            await asyncio.gather(*(_ask(administering, project, 1) for project in little))
            told = Told((await asyncio.to_thread(_metrics, keyed)).splitlines())
            if told.is_whole({OTHER, *(project.id for project in much)}):
                break
            assert time.monotonic() < deadline_s, f"last seen: {told.lines}"
            await asyncio.sleep(0.2)
    assert all(1 / (MAX_NAMED + len(little)) < index <= 1 for index in told.values("tenant_fairness"))
    assert min(told.values("fairness_gap_tokens")) >= 0


def _metrics(keyed: Service) -> str:
    """Of all nodes, as an operator's Prometheus reads them."""
    answer = httpx.get(f"{keyed.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code in (200, 503), answer.text  # Ray's agent may take longer than the route waits
    return answer.text if answer.status_code == 200 else ""


class Project(NamedTuple):
    """A project, and a key of it."""

    id: str
    key: str


class Told:
    """This project's series."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = [line.removeprefix("ray_polylora_") for line in lines if line.startswith("ray_polylora_")]

    def values(self, name: str, label: str = "") -> list[float]:
        """Of every process; `label` is part of the labels."""
        return [float(line.split()[-1]) for line in self._of(name) if label in line]

    def labels(self, name: str, label: str) -> set[str]:
        """All values of one label."""
        return {found for line in self._of(name) for found in re.findall(rf'[{{,]{label}="([^"]*)"', line)}

    def is_whole(self, tenants: Set[str]) -> bool:
        """Whether it names these and nobody else, and has two refusals, the fairness index and both engines' gaps."""
        named = self.labels("tenant_tokens_per_second", "tenant")
        num_refused = sum(self.values("rate_limit_rejections_total", 'reason="day"'))
        has_gauges = bool(self.values("tenant_fairness")) and len(self.values("fairness_gap_tokens")) == 2
        return named == tenants and num_refused >= 2 and has_gauges

    def _of(self, name: str) -> list[str]:
        return [line for line in self.lines if line.partition("{")[0].split()[0] == name]


async def new_project(administering: openai.AsyncOpenAI, name: str) -> Project:
    projects = administering.admin.organization.projects
    project = await projects.create(name=name)
    account = await projects.service_accounts.create(project.id, name="app")
    assert account.api_key is not None
    return Project(project.id, account.api_key.value)


async def _ask(asking: openai.AsyncOpenAI, project: Project, max_tokens: int) -> None:
    as_project = asking.with_options(api_key=project.key)
    await as_project.completions.create(
        model="tiny", prompt="hello there", max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )


async def _ask_a_thousand_times(service: Service, api_key: str) -> list[tuple[int, int]]:
    """Tokens of the prompts and of the answers that were admitted; the others were 429s that say when to come back."""
    turns = asyncio.Semaphore(50)
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
