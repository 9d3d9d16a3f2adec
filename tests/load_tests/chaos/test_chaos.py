"""What the command calls wrong, and what it excuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from load_tests.chaos import registrations as registrations_module
from load_tests.chaos.__main__ import Usage, grown
from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import DOOR_S, Cut, Doors, Traffic, ask

Handler = Callable[[httpx.Request], httpx.Response]
BODY = {"model": "tiny", "prompt": "x", "seed": 3}


def stream_of(*texts: str, ends: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}" for text in texts] + ["data: [DONE]"] * ends
    return httpx.Response(200, text="\n\n".join(lines) + "\n\n")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Have every client talk to a handler."""
    real = httpx.AsyncClient

    def set_handler(handler: Handler) -> None:
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **options: real(transport=httpx.MockTransport(handler), **options)
        )

    return set_handler


async def asked(handler: Handler) -> str:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test") as http:
        return await ask(http, BODY)


async def test_an_answer_is_whole_or_cut_or_refused() -> None:
    assert await asked(lambda _: stream_of("a", "b")) == "ab"
    with pytest.raises(Cut, match="without") as cut:
        await asked(lambda _: stream_of("a", ends=False))
    assert cut.value.text == "a"
    with pytest.raises(Cut, match="balancer says 503"):
        await asked(lambda _: httpx.Response(503, text="<html>"))
    with pytest.raises(RuntimeError, match="not ready"):
        await asked(lambda _: httpx.Response(503, json={"error": "not ready"}))

    def breaks(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    with pytest.raises(Cut, match="ReadError"):
        await asked(breaks)


async def test_only_the_death_of_a_door_excuses_a_closed_connection(serve: Callable[[Handler], None]) -> None:
    now_s, answers = 0.0, [stream_of("a", "b")]
    serve(lambda _: answers.pop(0))
    doors = Doors(lambda: now_s)
    traffic = Traffic("http://test", [BODY], doors, seed=0)
    await traffic.learn()

    async def one(answer: httpx.Response) -> list[str]:
        answers.append(answer)
        num_before = len(traffic.wrongs)
        await traffic.compare()
        return [wrong.split(": ")[1] for wrong in traffic.wrongs[num_before:]]

    assert await one(stream_of("ab")) == []
    assert await one(stream_of("ac")) == ["wrong tokens"]
    assert await one(stream_of("a", ends=False)) == ["cut off"]
    assert await one(httpx.Response(503, json={"error": "busy"})) == ["refused"]
    doors.killed()
    assert await one(stream_of("a", ends=False)) == []
    assert await one(stream_of("c", ends=False)) == ["wrong tokens"], "what came is not the beginning of the answer"
    assert await one(httpx.Response(503, json={"error": "busy"})) == ["refused"]
    now_s += DOOR_S + 1
    assert await one(stream_of("a", ends=False)) == ["cut off"]
    assert traffic.ended["answered"] == 1


class Registry:
    """A service that forgets what it is told to forget."""

    def __init__(self) -> None:
        self.means: dict[str, str] = {}
        self.forgets = False
        self.num_changes = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/v1/loras":
            self.num_changes += 1
            body = json.loads(request.content)
            if not self.forgets:
                self.means[body["name"]] = body["path"]
            return httpx.Response(201, json={})
        name = request.url.path.rpartition("/")[2]
        if request.method == "DELETE":
            self.num_changes += 1
            self.means.pop(name, None)
            return httpx.Response(200, json={})
        if request.method == "GET":
            return httpx.Response(200, json={"state": "LOADED"}) if name in self.means else httpx.Response(404)
        return stream_of(f"as {self.means[json.loads(request.content)['model']]}")


@pytest.mark.parametrize("fault", ["", "loses a change", "serves another source"])
async def test_what_was_acknowledged_must_be_there(
    serve: Callable[[Handler], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations_module, "PAUSE_S", 0.0)
    registry = Registry()
    serve(registry)
    registrations = Registrations("http://test", ["a", "b"], seed=1)
    running = asyncio.create_task(registrations.run())
    while registry.num_changes < 100 and not running.done():
        await asyncio.sleep(0)
    registry.forgets = fault == "loses a change"
    while registry.num_changes < 200 and not running.done():
        await asyncio.sleep(0)
    registrations.stop()
    await running
    if fault == "serves another source":
        registry.means = dict.fromkeys(registry.means, "a")
    await registrations.check({"prompt": "x"}, {"a": "as a", "b": "as b"})
    assert bool(registrations.wrongs) == bool(fault), registrations.wrongs


def test_a_service_whose_processes_pile_up_has_grown() -> None:
    before = Usage(20, 1000, 3000)
    assert grown(before, Usage(21, 1100, 3300)) == []
    assert grown(before, Usage(40, 1000, 9000)) == [
        "num_processes grew from 20 to 40",
        "resident_mb grew from 3000 to 9000",
    ]
