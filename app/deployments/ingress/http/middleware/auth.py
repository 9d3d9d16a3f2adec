"""Authentication: turns a request's API key into its `Principal` before any route runs.

Only a key or the management token identifies a caller. While no keys exist, requests from the service's own machine
are admitted without one. A key never appears in a message or a log.
"""

from __future__ import annotations

import hmac

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.error_responses import InvalidApiKey
from app.deployments.ingress.http.middleware.origin_check import (
    HttpPolicy,
    client_address,
    error_response,
    is_console,
)
from app.deployments.ingress.http.middleware.request_log import PROBES
from app.deployments.ingress.http.middleware.sessions import ENVIRONMENT_KEY, ConsoleSessions, Session
from app.deployments.ingress.principal import STATE, Principal, address_of
from app.deployments.ingress.serializers.messages import is_messages
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.tenancy.auth.key_crypto import is_key, key_digest
from app.deployments.tenancy.auth.tenant_mirror import KnownKey
from app.deployments.tenancy.models import PUBLIC
from app.deployments.tenancy.quota.address_limiter import AddressLimiter
from app.deployments.tenancy.quota.limits import LimitError
from app.engine.errors import InvalidRequest, PolyloraError
from app.redaction import holds_key

SESSION_PATH = "/v1/session"


class Authenticator:
    """Resolves a request's caller from its headers and the table of keys."""

    def __init__(self, accounting: RequestAccounting, policy: HttpPolicy) -> None:
        self._accounting = accounting
        self._policy = policy

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a key is rejected."""
        if self._policy.auth == "auto":
            return self._accounting.view.has_keys or self._policy.admin_digest is not None
        return self._policy.auth == "keys"

    def caller(self, request: HTTPConnection, session: Session | None = None) -> Principal:
        """`session`: the console's, of a request without a key. Raises InvalidApiKey."""
        value = request_key(request)
        if session is not None:
            return self._authenticate_session(request, session)
        if self.needs_keys or is_key(value) or self._is_environment_key(value):
            return self._authenticate_key(request, value)
        if self._policy.auth == "auto" and not self._policy.is_local(request.scope):
            if self._policy.is_management_token(value):
                return _operator(request)
            raise InvalidApiKey(
                "this service has no API keys yet and answers to its own machine only; make the first with "
                "polylora create-admin-key, or set http.auth: open to admit everyone"
            )
        return Principal(DEFAULT_TENANT, address_of(request))

    def _authenticate_key(self, request: HTTPConnection, value: str) -> Principal:
        now_s = self._accounting.clock()
        found = self._accounting.view.find(value, now_s)
        if found is not None:
            self._accounting.note_key_use(found.key.id, now_s)
            return self._key_principal(request, found)
        address = address_of(request)
        if self._is_environment_key(value):
            return self._admin_principal(request, f"{ENVIRONMENT_KEY}, {address}", ENVIRONMENT_KEY)
        if self._policy.is_management_token(value):
            return _operator(request)
        raise InvalidApiKey(
            "the API key is wrong, has expired or was revoked"
            if value
            else "a key is needed: send the header Authorization: Bearer <API key>"
        )

    def _authenticate_session(self, request: HTTPConnection, session: Session) -> Principal:
        if session.key_id == ENVIRONMENT_KEY and self._policy.admin_digest is not None:
            return self._admin_principal(request, f"{ENVIRONMENT_KEY}, {address_of(request)}", ENVIRONMENT_KEY)
        now_s = self._accounting.clock()
        found = self._accounting.view.find_id(session.key_id, now_s)
        if found is None:
            raise InvalidApiKey("the key of this session has expired or was revoked; sign in with another")
        self._accounting.note_key_use(found.key.id, now_s)
        return self._key_principal(request, found)

    def _is_environment_key(self, value: str) -> bool:
        digest = self._policy.admin_digest
        return digest is not None and hmac.compare_digest(key_digest(value), digest)

    def _key_principal(self, request: HTTPConnection, known: KnownKey) -> Principal:
        who = f"{known.key.id}, {address_of(request)}"
        tenant = known.tenant
        if tenant is None:
            return self._admin_principal(request, who, known.key.id)
        project_id = request.headers.get("openai-project")
        if project_id is not None and project_id != tenant.id:
            raise InvalidApiKey("the header OpenAI-Project names another project than the API key's; leave it out")
        return Principal(tenant.id, who, tenant, known.key.id, "project", role=known.key.role)

    def _admin_principal(self, request: HTTPConnection, who: str, key_id: str) -> Principal:
        """An administrator: of the public adapters, or of the project that the header OpenAI-Project names."""
        project_id = request.headers.get("openai-project")
        if project_id is None:
            return Principal(DEFAULT_TENANT, who, PUBLIC, key_id, "admin")
        tenant = self._accounting.view.tenant(project_id)
        if tenant is None or tenant.archived_s is not None:
            raise InvalidApiKey(f"the header OpenAI-Project names {project_id[:64]!r}, which is no project here")
        return Principal(tenant.id, who, tenant, key_id, "admin")


def _is_public(scope: Scope) -> bool:
    """Whether a request needs no caller: a probe, a file of the console, or signing out, also after a session's end."""
    path: str = scope["path"]
    return path in PROBES or is_console(path) or (path == SESSION_PATH and scope["method"] == "DELETE")


def _check_url(scope: Scope) -> None:
    """Raises InvalidRequest for a URL with an API key in it: proxies, logs and browsers keep URLs."""
    if holds_key(scope["path"]) or holds_key(scope["query_string"].decode("latin-1")):
        raise InvalidRequest(
            "the URL contains an API key, which proxies may have logged: revoke it, and send keys in the "
            "header Authorization: Bearer"
        )


def request_key(request: HTTPConnection) -> str:
    """The API key of a request, or "". The Authorization header has priority."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    value = value.strip() if kind.lower() == "bearer" else ""
    # Anthropic's clients send the key as `x-api-key`; other routes ignore that header.
    if not value and is_messages(request.scope["path"]):
        value = request.headers.get("x-api-key", "").strip()
    return value


def _operator(request: HTTPConnection) -> Principal:
    return Principal(DEFAULT_TENANT, f"management token, {address_of(request)}", PUBLIC, "", "operator")


class AuthMiddleware:
    """ASGI middleware that stores the caller in the request's state, or answers with an error."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, sessions: ConsoleSessions, addresses: AddressLimiter
    ) -> None:
        """`addresses`: calls of callers without a project, refused requests among them."""
        self._app = app
        self._authenticator = authenticator
        self._sessions = sessions
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_public(scope):
            try:
                connection = HTTPConnection(scope)
                # A key comes first: it starts a new session where an old one has ended.
                session = None if request_key(connection) else await self._sessions.of(connection)
                caller = self._authenticator.caller(connection, session)
                _check_url(scope)
            except PolyloraError as error:
                await error_response(self._refusal(scope, error), scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})[STATE] = caller
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, error: PolyloraError) -> PolyloraError:
        """The error, or a LimitError once its address has had too many."""
        try:
            self._addresses.take(client_address(scope))
        except LimitError as over_limit:
            return over_limit
        return error
