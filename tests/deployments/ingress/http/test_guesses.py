"""Stop strings, `n` and token limits end an answer where they would without guesses, however tokens arrive.

Two services with the same model answer random requests; the engine of one verifies up to seven guessed tokens a step,
which a prediction makes right for a while and then wrong.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from tests.budgets import examples
from tests.deployments.fleet import Fleet
from tests.deployments.http_service import WRITING_SPEC, Service, writing_text
from tests.deployments.managed import ManagedStore
from tests.engine.structured_output.tokens import tiny_vocabulary
from tests.seeds import any_seed

NUM_GUESSES = 7


@asynccontextmanager
async def served(folder: Path, num_guesses: int) -> AsyncIterator[tuple[httpx.AsyncClient, Fleet]]:
    fleet = Fleet(1, spec=WRITING_SPEC, grammars=tiny_vocabulary, num_guesses=num_guesses)
    managed = ManagedStore.at(folder)
    service = Service(fleet, managed, writing_text())
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client, fleet
    await service.close()
    await managed.close()
    fleet.stop()


async def received(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return found["choices"], usage


def random_body(generator: random.Random) -> dict[str, Any]:
    words = " ".join(generator.choice(("red", "green", "[1, 2]", "{}")) for _ in range(generator.randint(1, 6)))
    return {
        "model": "base",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": generator.randint(1, 40),
        "temperature": generator.choice((0.0, 0.9)),
        "seed": generator.randrange(1000),
        "n": generator.randint(1, 3),
        "logprobs": generator.random() < 0.3,
    }


async def test_stop_strings_and_several_answers_are_the_same_with_guesses(tmp_path: Path) -> None:
    generator = random.Random(any_seed())
    async with AsyncExitStack() as stack:
        plain, _ = await stack.enter_async_context(served(tmp_path / "plain", 0))
        guessing, fleet = await stack.enter_async_context(served(tmp_path / "guessing", NUM_GUESSES))
        for number in range(examples(12)):
            body = random_body(generator)
            if not number:
                body |= {"structured_outputs": {"regex": "a{6}b{6}"}, "max_tokens": 20}
            text = (await received(plain, body))[0][-1]["message"]["content"]
            place = generator.randrange(max(len(text), 1))
            if stop := text[place : place + generator.randint(1, 4)]:
                body["stop"] = generator.choice(([stop], ["never met", stop], stop))
            body["prediction"] = {"type": "content", "content": text[: generator.randint(0, len(text))] + "x"}
            assert await received(guessing, body) == await received(plain, body), body
        (replica,) = fleet.replicas.values()
        stats = replica.thread.stats()
        assert stats.num_accepted_tokens > 0, "several tokens came in one step"
