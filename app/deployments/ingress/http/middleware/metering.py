"""Metering: every request is charged to its caller before its body is read, whatever its answer will be. Where the body
says which of several base models the request is for, it is read first (`BaseRouter`).

Inference is charged as a request, everything else as a call, and bodies as further calls while they arrive (`_Body`). A
project is charged against its limits, a caller without one by its address. The operator is not limited: admin keys,
the management token, and this machine while it needs no key.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import INFERENCE_PATHS
from app.deployments.ingress.error_responses import BodyTimeout
from app.deployments.ingress.http.base_router import BaseRouter, Target
from app.deployments.ingress.http.middleware.content_encoding import decode_body
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy, client_address, error_response
from app.deployments.ingress.principal import STATE, Principal
from app.deployments.ingress.service import IngressService
from app.deployments.tenancy.quota.address_limiter import AddressLimiter
from app.deployments.tenancy.quota.limits import LimitError
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.errors import PolyloraError, QueueFull

#: Bytes of a body per call, by what the route does with it: computes tokens, stores the bytes, or changes the registry
#: entry by entry.
INFERENCE_BYTES, UPLOAD_BYTES, CALL_BYTES = 64 << 10, 1 << 20, 1 << 10
#: The part of the calls per minute that one body may cost, so that no body is too long for its project.
MAX_PART = 0.5
#: A client may let the service wait for a body this long, and longer by its bytes.
BODY_TIMEOUT_S, MIN_BYTES_PER_S = 10.0, 100_000
#: A body that has not arrived as a whole after this long, or with its first part, is slow.
SLOW_AFTER_S = 1.0
#: Slow bodies of one key in one ingress.
MAX_SLOW_BODIES = 128


class MeteringMiddleware:
    """ASGI middleware inside authentication. `addresses`: calls of callers without a project. `router`: if there are
    several base models; then `app` and `service` are the first one's."""

    def __init__(
        self,
        app: ASGIApp,
        service: IngressService,
        policy: HttpPolicy,
        addresses: AddressLimiter,
        router: BaseRouter | None = None,
    ) -> None:
        self._app = app
        self._router = router
        self._service = service
        self._policy = policy
        self._addresses = addresses
        self._slow_bodies: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller: Principal | None = scope.get("state", {}).get(STATE)  # a probe has none
        reservation: Reservation | None = None
        refusal: PolyloraError | None = None
        body = _Body(decode_body(scope, receive), self._slow_bodies, self._payer(scope, caller), _bytes_per_call(scope))
        target = Target(self._service, self._app, scope, body.receive)
        try:
            if caller is not None and self._router is not None:
                try:
                    target = await self._router.route(target, caller)
                except PolyloraError as error:  # charged like any other request
                    refusal = error
            if caller is not None:
                try:
                    reservation = await self._charge_arrival(target.service, scope, caller)
                except LimitError as error:
                    await self._refuse(target.service, scope, caller, error)(scope, receive, send)
                    return
                scope["state"][STATE] = caller._replace(reservation=reservation)
            if refusal is not None:
                answer = error_response(refusal, scope["path"])
                self._service.observe("none", answer.status_code, None)
                await answer(scope, receive, send)
                return
            await target.app(target.scope, target.receive, send)
        finally:
            body.close()
            if reservation is not None:
                self._service.accounting.limiter.settle(reservation, {})

    async def _charge_arrival(self, service: IngressService, scope: Scope, caller: Principal) -> Reservation | None:
        is_inference = scope["path"] in INFERENCE_PATHS and scope["method"] == "POST"
        if caller.kind == "project":
            return await service.accounting.charge_arrival(caller, is_inference=is_inference)
        if not is_inference and self._is_limited(scope, caller):
            self._addresses.take(client_address(scope))
        return None

    def _is_limited(self, scope: Scope, caller: Principal) -> bool:
        """Whether a caller without a project is not the operator."""
        return caller.kind == "open" and not self._policy.is_local(scope)

    def _payer(self, scope: Scope, caller: Principal | None) -> _Payer:
        if caller is not None and caller.kind == "project":
            calls = caller.tenant.limits.calls_per_min
            return _Payer(caller.key_id, calls, partial(self._service.accounting.charge_calls, caller))
        address = client_address(scope)
        if caller is None or not self._is_limited(scope, caller):
            return _Payer(address)

        async def charge(number: int) -> None:
            self._addresses.take(address, number)

        return _Payer(address, self._addresses.limit, charge)

    def _refuse(self, service: IngressService, scope: Scope, caller: Principal, error: LimitError) -> JSONResponse:
        path: str = scope["path"]
        route = path.removeprefix("/v1").split("/")[1] if path in INFERENCE_PATHS else "none"
        answer = error_response(error, path)
        service.observe(route, answer.status_code, None)
        answer.headers.update(service.accounting.headers(caller))
        return answer


class _Payer(NamedTuple):
    """The payer of a body. `limit`: its calls per minute, None if bytes cost nothing."""

    key: str
    limit: int | None = None
    charge: Callable[[int], Awaitable[None]] | None = None


class _Body:
    """The receiving end of one request: counts the bytes of its body, and limits how long the body takes.

    Only the time in which the service waits for the client counts.
    """

    def __init__(self, receive: Receive, slow_bodies: Counter[str], payer: _Payer, bytes_per_call: int) -> None:
        """`slow_bodies`: their number by key, of all requests."""
        self._receive = receive
        self._slow_bodies = slow_bodies
        self._payer = payer
        self._bytes_per_call = bytes_per_call
        self._max_calls = 0 if payer.limit is None else int(payer.limit * MAX_PART)
        self._num_bytes = self._num_calls = 0
        self._waited_s = 0.0
        self._is_slow = self._is_complete = False

    async def receive(self) -> Message:
        """The next message. Raises BodyTimeout, QueueFull, LimitError."""
        if self._is_complete:
            return await self._receive()
        message = await self._next_part()
        self._is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes >= self._bytes_per_call:
            await self._charge()
        if self._is_complete:
            self.close()
        else:
            self._note_slow()
        return message

    def close(self) -> None:
        """The body has arrived, or the request has ended."""
        if self._is_slow:
            self._is_slow = False
            self._slow_bodies[self._payer.key] -= 1
            if not self._slow_bodies[self._payer.key]:
                del self._slow_bodies[self._payer.key]

    async def _charge(self) -> None:
        num_calls = min(self._num_bytes // self._bytes_per_call, self._max_calls)
        number, self._num_calls = num_calls - self._num_calls, num_calls
        if number and self._payer.charge is not None:
            await self._payer.charge(number)

    async def _next_part(self) -> Message:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            if not self._is_slow:
                try:
                    async with asyncio.timeout(SLOW_AFTER_S):
                        return await self._receive()
                except TimeoutError:
                    self._note_slow()
            allowed_s = BODY_TIMEOUT_S + self._num_bytes / MIN_BYTES_PER_S
            async with asyncio.timeout(allowed_s - self._waited_s - (clock() - began_s)):
                return await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"only {self._num_bytes} bytes of the body have arrived; a body may take {BODY_TIMEOUT_S:g} s and a "
                f"second more for each {MIN_BYTES_PER_S} bytes"
            ) from None
        finally:
            self._waited_s += clock() - began_s

    def _note_slow(self) -> None:
        if self._is_slow:
            return
        if self._slow_bodies[self._payer.key] >= MAX_SLOW_BODIES:
            raise QueueFull(f"{MAX_SLOW_BODIES} bodies of this key are still arriving here, the limit; retry later")
        self._slow_bodies[self._payer.key] += 1
        self._is_slow = True


def _bytes_per_call(scope: Scope) -> int:
    path, method = scope["path"], scope["method"]
    if path in INFERENCE_PATHS:
        return INFERENCE_BYTES
    is_upload = (method == "PUT" and path.endswith("/weights")) or (method == "POST" and path == "/v1/files")
    return UPLOAD_BYTES if is_upload else CALL_BYTES
