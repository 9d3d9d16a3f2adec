"""Who is let in: API keys become callers here, before any route sees a request.

In: requests, the table of keys and the rules (`http:` of the settings). Out: the same requests with their `Principal`, or
a 401 that says how to come in. Rule: nothing but a key (or the management token) says who somebody is; while there are
none at all, requests from the service's own machine are let in without. A key is in no message and no log.
"""

from __future__ import annotations

import hmac

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.error_responses import InvalidApiKey, error_reply
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.principal import STATE, Principal, address_of
from app.deployments.ingress.serializers.messages import body_told, is_messages
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.tenancy.auth.key_crypto import is_key, key_digest
from app.deployments.tenancy.auth.tenant_mirror import KnownKey
from app.deployments.tenancy.models import PUBLIC
from app.engine.errors import InvalidRequest, PolyloraError
from app.redaction import holds_key

#: What anybody may ask: whether the service lives.
FREE_PATHS = frozenset({"/health", "/readyz", "/livez"})
#: The id of the admin key that comes from the environment.
ENVIRONMENT_KEY = "key_environment"


class Authenticator:
    """Says who a request's sender is."""

    def __init__(self, tenancy: RequestAccounting, rules: HttpPolicy) -> None:
        self._tenancy = tenancy
        self._rules = rules

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a key is nobody's."""
        if self._rules.auth == "auto":
            return self._tenancy.view.has_keys or self._rules.admin_digest is not None
        return self._rules.auth == "keys"

    def caller(self, request: HTTPConnection) -> Principal:
        """Raises InvalidApiKey."""
        value = _given_key(request)
        if self.needs_keys or is_key(value):
            return self._known(request, value)
        if self._rules.auth == "auto" and not self._rules.is_local(request.scope):
            if self._rules.is_management_token(value):
                return _operator(request)
            raise InvalidApiKey(
                "this service has no API keys yet and answers to its own machine only; make the first with polylora "
                "create-admin-key, or say http.auth: open to let everybody in"
            )
        return Principal(DEFAULT_TENANT, address_of(request))

    def _known(self, request: HTTPConnection, value: str) -> Principal:
        now_s = self._tenancy.clock()
        found = self._tenancy.view.find(value, now_s)
        if found is not None:
            self._tenancy.note_use(found.key.id, now_s)
            return self._caller_of(request, found)
        where = address_of(request)
        digest = self._rules.admin_digest
        if digest is not None and hmac.compare_digest(key_digest(value), digest):
            return self._admin(request, f"{ENVIRONMENT_KEY}, {where}", ENVIRONMENT_KEY)
        if self._rules.is_management_token(value):
            return _operator(request)
        raise InvalidApiKey(
            "the API key is wrong, has expired or was revoked"
            if value
            else "a key is needed: send the header Authorization: Bearer <API key>"
        )

    def _caller_of(self, request: HTTPConnection, known: KnownKey) -> Principal:
        who = f"{known.key.id}, {address_of(request)}"
        tenant = known.tenant
        if tenant is None:
            return self._admin(request, who, known.key.id)
        wanted = request.headers.get("openai-project")
        if wanted is not None and wanted != tenant.id:
            raise InvalidApiKey("the header OpenAI-Project names another project than the API key's; leave it out")
        return Principal(tenant.id, who, tenant, known.key.id, "project")

    def _admin(self, request: HTTPConnection, who: str, key_id: str) -> Principal:
        """Manages the public adapters, or those of the project that the header OpenAI-Project names."""
        wanted = request.headers.get("openai-project")
        if wanted is None:
            return Principal(DEFAULT_TENANT, who, PUBLIC, key_id, "admin")
        tenant = self._tenancy.view.tenant(wanted)
        if tenant is None or tenant.archived_s is not None:
            raise InvalidApiKey(f"the header OpenAI-Project names {wanted[:64]!r}, which is no project here")
        return Principal(tenant.id, who, tenant, key_id, "admin")


def _check_url(scope: Scope) -> None:
    """Raises InvalidRequest for a URL with an API key in it: proxies, logs and browsers keep URLs."""
    if holds_key(scope["path"]) or holds_key(scope["query_string"].decode("latin-1")):
        raise InvalidRequest(
            "the URL holds an API key, which may have been written down on its way: revoke it, and send keys in the "
            "header Authorization: Bearer"
        )


def _given_key(request: HTTPConnection) -> str:
    """What a request gives for its key; empty where it gives none. Of two, the one in Authorization."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    value = value.strip() if kind.lower() == "bearer" else ""
    # Anthropic's clients send the key as `x-api-key`, which is none anywhere else.
    if not value and is_messages(request.scope["path"]):
        value = request.headers.get("x-api-key", "").strip()
    return value


def _operator(request: HTTPConnection) -> Principal:
    return Principal(DEFAULT_TENANT, f"management token, {address_of(request)}", PUBLIC, "", "operator")


class AuthMiddleware:
    """ASGI middleware: every request behind it has a caller in its state."""

    def __init__(self, app: ASGIApp, gate: Authenticator) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE_PATHS:
            try:
                caller = self._gate.caller(HTTPConnection(scope))
                _check_url(scope)
            except PolyloraError as error:
                answer = error_reply(error)
                refusal = JSONResponse(
                    body_told(answer, scope["path"]), status_code=answer.status, headers=answer.headers
                )
                await refusal(scope, receive, send)
                return
            scope.setdefault("state", {})[STATE] = caller
        await self._app(scope, receive, send)
