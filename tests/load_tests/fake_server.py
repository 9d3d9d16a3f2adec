"""A tiny OpenAI server that says as many words as it is asked for, and sometimes misbehaves by request.

It answers by model name: "refuse" with 429, "break" ends its stream early, "late" waits first, "odd" sends what is
no event of a completion (a text as it is), "silent" counts no token, "held" keeps its answer open after [DONE] and
"reset" cuts the connection there, "never" says nothing, "ctrl-c" interrupts this process and says nothing. Nothing
is answered before as many requests have been there at once as `min_open` says: what is sent one by one hangs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    """Keeps every body and the highest number of requests it had at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.registered: list[str] = []
        self.num_open = self.max_open = 0
        self.clients: set[object] = set()
        self.min_open = 1
        self._arrived = asyncio.Condition()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers["Authorization"])
        self.clients.add(request.transport)
        if body["model"] == "refuse":
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            async with self._arrived:
                self._arrived.notify_all()
                await self._arrived.wait_for(lambda: self.max_open >= self.min_open)
            if body["model"] in {"never", "ctrl-c"}:
                if body["model"] == "ctrl-c":
                    os.kill(os.getpid(), signal.SIGINT)
                while request.transport is not None:
                    await asyncio.sleep(0.01)
            return await self._stream(request, body)
        finally:
            self.num_open -= 1

    async def register(self, request: web.Request) -> web.Response:
        self.registered.append((await request.json())["path"])
        return web.json_response({}, status=201)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: object) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())

        if body["model"] == "odd":
            await send(body["odd"])
        await asyncio.sleep(0.05 if body["model"] == "late" else 0.001)
        for i in range(body["max_tokens"]):
            last = i == body["max_tokens"] - 1
            await send({"choices": [{"text": f"w{i} ", "finish_reason": "length" if last else None}]})
            if body["model"] == "break":
                return response
            await asyncio.sleep(0)
        num_words = len(body["prompt"].split())
        usage: dict[str, Any] = {"prompt_tokens": num_words, "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": num_words // 2}
        if body["model"] == "silent":
            usage["completion_tokens"] = 0
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        if body["model"] == "held":
            while request.transport is not None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01 if body["model"] == "reset" else 0)
        if body["model"] == "reset" and request.transport is not None:
            request.transport.abort()
        return response


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, FakeServer]]:
    """(URL ending in /v1, the server), on a port of 127.0.0.1."""
    fake = FakeServer()
    application = web.Application()
    application.router.add_post("/v1/completions", fake.completions)
    application.router.add_post("/v1/loras", fake.register)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/v1", fake
    finally:
        await runner.cleanup()
