"""What comes and goes beside the traffic: adapters (loaded, replaced, unloaded), batches, projects and keys."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx
import openai

from load_tests.soak.traffic import NUM_TOKENS, PROMPT, compare

#: Names that change at a time, and seconds between two rounds of a name, a batch and a project.
NUM_NAMES = 4
PAUSES_S = {"adapters": 0.05, "batches": 20.0, "projects": 5.0}
LINES_OF_A_BATCH = 20
#: Of a request, and to connect, which openai's client would do for 5 s only.
TIMEOUT_S = 180.0


class Churn:
    """`sources`: folders under the service's root, with the greedy answers of their adapters. `key`: of a project that
    stays. What is done counts in `done`, completed answers in `num_answers`."""

    def __init__(self, url: str, admin_key: str, key: str, sources: Mapping[str, str]) -> None:
        self._sources = list(sources.items())
        self._admin = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=admin_key, admin_api_key=admin_key, max_retries=0, timeout=TIMEOUT_S
        )
        self._key = key
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),
        )
        self._numbers = itertools.count()
        self._is_over = False
        self.done: Counter[str] = Counter()
        self.num_answers = 0
        self.wrongs: list[str] = []

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        """Until `stop`."""
        workers: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = [
            *[("adapters", self._change_an_adapter)] * NUM_NAMES,
            ("batches", self._run_a_batch),
            ("projects", self._make_a_project),
        ]
        async with self._http, self._admin, asyncio.TaskGroup() as group:
            for kind, work in workers:
                group.create_task(self._repeat(kind, work))

    async def _repeat(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        while not self._is_over:
            try:
                await work()
            except (RuntimeError, openai.OpenAIError, httpx.HTTPError) as error:
                self.wrongs.append(f"{time.strftime('%H:%M:%S')} {kind}: {type(error).__name__}: {error}")
                await asyncio.sleep(1.0)
            await asyncio.sleep(PAUSES_S[kind])

    async def _ask(self, model: str, key: str) -> str:
        client = self._admin.with_options(api_key=key)
        options = {"max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        answer = await client.completions.create(model=model, prompt=PROMPT, **options)  # type: ignore[call-overload]
        self.num_answers += 1
        text: str = answer.choices[0].text
        return text

    async def _change_an_adapter(self) -> None:
        number = next(self._numbers)
        name = f"changing-{number}"
        for in_place in (False, True):
            source, expected = self._sources[(2 * number + in_place) % len(self._sources)]
            body = {"lora_name": name, "lora_path": source, "load_inplace": in_place}
            (await self._http.post("/v1/load_lora_adapter", json=body)).raise_for_status()
            compare(await self._ask(name, self._key), expected)
            self.done["replaced" if in_place else "loaded"] += 1
        (await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
        self.done["unloaded"] += 1
        try:
            await self._ask(name, self._key)
        except openai.NotFoundError:
            return
        raise RuntimeError(f"{name} answers after it was unloaded")

    async def _run_a_batch(self) -> None:
        client = self._admin.with_options(api_key=self._key)
        lines, expected = [], {}
        for index in range(LINES_OF_A_BATCH):
            source, expected[str(index)] = self._sources[index % len(self._sources)]
            body = {"model": source, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            lines.append({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body})
        text = "\n".join(map(json.dumps, lines)).encode()
        file = await client.files.create(file=("lines.jsonl", text), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.5)
            batch = await client.batches.retrieve(batch.id)
        if batch.status != "completed" or batch.output_file_id is None:
            raise RuntimeError(f"a batch ended as {batch.status}: {batch.errors}")
        answers = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
        self.num_answers += len(answers)
        compare({one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}, expected)
        for file_id in (file.id, batch.output_file_id):
            await client.files.delete(file_id)
        self.done["batches"] += 1

    async def _make_a_project(self) -> None:
        projects = self._admin.admin.organization.projects
        project = await projects.create(name=f"passing-{next(self._numbers)}")
        account = await projects.service_accounts.create(project.id, name="app")
        if account.api_key is None:
            raise RuntimeError("a new service account has no key")
        source, expected = self._sources[0]
        compare(await self._ask(source, account.api_key.value), expected)
        await projects.service_accounts.delete(account.id, project_id=project.id)
        await projects.archive(project.id)
        try:
            await self._ask(source, account.api_key.value)
        except openai.AuthenticationError:
            self.done["projects"] += 1
            return
        raise RuntimeError("a deleted key is accepted")
