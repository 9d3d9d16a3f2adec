"""Clients that hold connections and say nothing, or half of a request, keep no other client from being answered."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.e2e.tenants.conftest import KEY, Keyed

pytestmark = pytest.mark.nightly

#: The flood comes from other loopback addresses than its victim, as from other machines.
FLOODERS = [f"127.0.0.{number}" for number in range(2, 6)]
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\n"
HEAD += "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Flood:
    """Open connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.writers: list[asyncio.StreamWriter] = []
        self.readers: list[asyncio.StreamReader] = []

    async def open(self, number: int, sent: bytes) -> None:
        """So many connections that send this; a few hundred at a time."""
        for begin in range(0, number, 200):
            await asyncio.gather(*(self._open_one(index, sent) for index in range(begin, min(begin + 200, number))))

    async def _open_one(self, index: int, sent: bytes) -> None:
        with contextlib.suppress(OSError):
            address = FLOODERS[index % len(FLOODERS)]
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
            writer.write(sent)
            self.readers.append(reader)
            self.writers.append(writer)

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.writers), return_exceptions=True)


@pytest_asyncio.fixture
async def flood(keyed: Keyed) -> AsyncIterator[Flood]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 10_000), most))
    found = Flood(int(keyed.url.rpartition(":")[2]))
    yield found
    await found.close()


def project_key(keyed: Keyed, name: str) -> str:
    admin = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=keyed.url, headers=admin, timeout=120) as http:
        project = http.post("/v1/organization/projects", json={"name": name}).raise_for_status().json()["id"]
        path = f"/v1/organization/projects/{project}/service_accounts"
        key: str = http.post(path, json={"name": "app"}).raise_for_status().json()["api_key"]["value"]
        return key


async def longest_answer_s(keyed: Keyed, key: str, during_s: float) -> float:
    """The longest time until any of a victim's requests was answered."""
    longest_s, until_s = 0.0, time.monotonic() + during_s
    chat = {"model": "r8", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    while time.monotonic() < until_s:
        for method, path, body in (
            ("GET", "/livez", None),
            ("GET", "/readyz", None),
            ("GET", "/v1/models", None),
            ("POST", "/v1/chat/completions", chat),
        ):
            began_s = time.monotonic()
            async with httpx.AsyncClient(base_url=keyed.url, headers=headers, timeout=60) as http:  # a new connection
                answer = await http.request(method, path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            longest_s = max(longest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.05)
    return longest_s


@pytest.mark.parametrize(
    ("number", "num_bytes"), [(4000, None), (2000, 1), (500, 20_000)], ids=["idle", "half sent", "half of a long body"]
)
async def test_a_flood_of_silent_clients_is_not_noticed(
    keyed: Keyed, flood: Flood, number: int, num_bytes: int | None
) -> None:
    victim, attacker = project_key(keyed, "victim"), project_key(keyed, "attacker")
    quiet_s = await longest_answer_s(keyed, victim, 3)
    sent = b"" if num_bytes is None else HEAD.format(attacker, 2 * num_bytes).encode() + b" " * num_bytes
    await flood.open(number, sent)
    assert await longest_answer_s(keyed, victim, 12) < 3 * quiet_s + 1
    async with asyncio.timeout(60):  # and each is closed within the time that it has
        for reader in flood.readers:
            with contextlib.suppress(OSError):
                await reader.read()
