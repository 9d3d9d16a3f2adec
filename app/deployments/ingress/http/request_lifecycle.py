"""A request that is being answered: until its client leaves, and counted however it ends.

In: a request and the work for it. Out: its result, or ClientGone. Rule: work whose client is gone is cancelled, and its
job counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastapi import Request

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import TABLE, ClientGone
from app.deployments.ingress.semantic_router.decision import ROUTE_HEADER
from app.deployments.ingress.service import IngressService

T = TypeVar("T")

#: Which adapter answered, "name@generation": an alias may have chosen it; and the digest of its contents.
ADAPTER_HEADER, DIGEST_HEADER = "X-Polylora-Adapter", "X-Polylora-Adapter-Digest"


def adapter_header(job: GenerationTask) -> dict[str, str]:
    """Says which adapter answers, and how the service has chosen it, if it was to."""
    adapter = job.requests[0].requested_adapter
    headers: dict[str, str] = {}
    if adapter is not None:
        headers = {ADAPTER_HEADER: f"{adapter.name}@{adapter.generation}", DIGEST_HEADER: adapter.digest}
    return headers if job.decision is None else headers | {ROUTE_HEADER: job.decision.header}


@contextmanager
def counted_if_cancelled(service: IngressService, route: str, job: GenerationTask) -> Iterator[None]:
    """Serve cancels the task of a client that has left: no error handler hears of that, and the job has ended."""
    try:
        yield
    except asyncio.CancelledError:
        service.observe(route, TABLE[ClientGone].status, job)
        raise


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; if the client goes away first, cancels it and raises ClientGone."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client went away before the answer")
        return task.result()
    finally:
        for unfinished in (task, leaving):
            if not unfinished.done():
                unfinished.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def first_event(request: Request, events: AsyncGenerator[bytes]) -> bytes:
    """The first event, unless the client leaves before it: then the events are closed, and what computes them.

    It may have come in the very moment in which its task is cancelled: then nobody would ask for the next one.
    """
    try:
        return await run_until_disconnect(request, anext(events))
    except BaseException:
        await events.aclose()
        raise


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
