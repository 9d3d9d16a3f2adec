"""Protection against requests from other sites' pages, and the policy for management requests.

A page that is open in an operator's browser can send requests to 127.0.0.1. Nothing that a browser sends without a
CORS preflight may change state: browsers name the page's site (`Origin`, `Sec-Fetch-Site`) and cannot send JSON to
another site without a preflight. A page whose name was made to resolve to this machine ("DNS rebinding") is recognised
by its Host header. API keys are checked later, in `auth`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import ADMIN_KEY, MANAGEMENT_TOKEN, PROXY_HEADERS, AuthMode, HttpConfig, ManagementAccess
from app.deployments.ingress.error_responses import (
    CrossSite,
    ManagementRefused,
    NotAuthenticated,
    UnknownContentType,
    WrongKeyKind,
    error_reply,
)
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.serializers.messages import error_body_for
from app.deployments.tenancy.auth.key_crypto import environment_digest, key_digest
from app.engine.errors import ConfigError, PolyloraError

#: Content types that a browser sends to another site without a preflight (Fetch standard, "CORS-safelisted").
_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
#: Paths that accept form uploads; these change nothing that is served, and browsers send Origin with them.
_UPLOAD_PATHS = ("/v1/files",)
#: Of every response: no guessing of its type, and no use by pages of other origins (CORS lets listed ones read it).
_RESPONSE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Signs of a proxy; `polylora-haproxy` adds Via where it finds another one.
_PROXY_HEADERS = frozenset(name.lower().encode() for name in (*PROXY_HEADERS, "Via"))


@dataclass(frozen=True, slots=True)
class HttpPolicy:
    """The `http:` settings. `allowed_origins`, `allowed_hosts`: in addition to the service's own.

    `token_digest`, `admin_digest`: SHA-256 of the management token and of the environment's admin key.
    `has_ha_proxy`: whether requests come through HAProxy, which adds X-Forwarded-For itself.
    `sees_clients`: whether client addresses are real. Behind a HAProxy that was started without `polylora-haproxy`
    every request appears to come from this machine.
    `is_on_loopback`: whether only this machine reaches the service. The address at which a request arrived does not
    say so: HAProxy passes the requests of a network on at 127.0.0.1.
    """

    management: ManagementAccess = "loopback"
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    token_digest: str | None = None
    has_ha_proxy: bool = False
    sees_clients: bool = True
    is_on_loopback: bool = False
    auth: AuthMode = "auto"
    admin_digest: str | None = None
    console: bool = True

    @classmethod
    def of(cls, config: HttpConfig, environ: Mapping[str, str], host: str) -> HttpPolicy:
        """host: the address that the service listens on.

        Raises ConfigError if a token is required and not set, or for a secret that could be guessed.
        """
        token_digest = environment_digest(environ, MANAGEMENT_TOKEN)
        if config.management == "token" and token_digest is None:
            raise ConfigError(f"http.management is 'token' but {MANAGEMENT_TOKEN} is not set where an ingress runs")
        has_ha_proxy = environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        is_ours = environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "").endswith("polylora-haproxy")
        hosts = tuple(host.lower() for host in config.allowed_hosts)
        return cls(
            config.management,
            config.allowed_origins,
            hosts,
            token_digest,
            has_ha_proxy,
            is_ours or not has_ha_proxy,
            _is_loopback((host, 0)),
            config.auth,
            environment_digest(environ, ADMIN_KEY),
            config.console,
        )

    def check_site(self, scope: Scope) -> None:
        """Raises CrossSite, or UnknownContentType for a body that another site's page could have sent."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        # Browsers always send a Host.
        is_known = not host or _is_own_name(host) or _without_port(host) in self.allowed_hosts
        if not is_known and self.is_on_loopback:
            raise CrossSite(
                f"this service listens on this machine only and is not called {host[:80]!r}; use 127.0.0.1 or "
                "localhost, or add the name to http.allowed_hosts"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self.allowed_origins and urlsplit(origin).netloc.lower() != host:
            raise CrossSite(f"requests from pages of {origin[:80]!r} are refused; http.allowed_origins may list it")
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and is_console(scope["path"])
        if origin is None and not is_link and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise CrossSite("requests from other sites' pages are refused")
        if scope["method"] in _SAFE_METHODS:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        path = scope["path"].rstrip("/")
        # A page cannot send PUT to another site without asking first.
        is_upload = path in _UPLOAD_PATHS or (scope["method"] == "PUT" and path.endswith("/weights"))
        is_upload = is_upload and kind == "multipart/form-data"
        if kind in _FORM_TYPES and not is_upload:
            raise UnknownContentType(
                f"the body's Content-Type is {kind!r}; send Content-Type: application/json "
                "(curl: --json in place of -d)"
            )

    def check_management(self, request: Request) -> None:
        """Raises WrongKeyKind for a key that only infers, and ManagementRefused or NotAuthenticated if a client without
        an API key may not manage adapters.
        """
        caller = http_principal(request)
        if caller.role == "inference":
            raise WrongKeyKind(
                "this key is for inference, not for management; use one with the role member or management"
            )
        if caller.kind != "open":
            return
        if self.management == "loopback" and not self.is_local(request.scope):
            raise ManagementRefused(
                "adapters are managed from the service's own machine only; http.management: token "
                f"(with {MANAGEMENT_TOKEN}) or open lets others do it"
            )
        if self.management == "token":
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self.is_management_token(given.strip()):
                raise NotAuthenticated("managing adapters needs the header Authorization: Bearer <management token>")

    def is_management_token(self, value: str) -> bool:
        """Whether `value` is the token of `http.management: token`."""
        if self.management != "token" or self.token_digest is None:
            return False
        return hmac.compare_digest(key_digest(value), self.token_digest)

    def is_local(self, scope: Scope) -> bool:
        """Whether a request comes from the service's own machine, and not through a proxy that runs there."""
        if not _is_loopback(scope.get("client")) or scope.get("http_version") == "1.0":
            return False
        names = {name for name, _ in scope["headers"]}
        is_passed_on = not names.isdisjoint(_PROXY_HEADERS) or (b"x-forwarded-for" in names and not self.has_ha_proxy)
        return not is_passed_on and (self.sees_clients or self.is_on_loopback)


class OriginCheckMiddleware:
    """ASGI middleware that answers with the errors of `HttpPolicy.check_site`, and adds to every response the headers
    that keep browsers from using it in other sites' pages.
    """

    def __init__(self, app: ASGIApp, policy: HttpPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_RESPONSE_HEADERS]
            await send(message)

        try:
            self._policy.check_site(scope)
        except PolyloraError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def is_console(path: str) -> bool:
    """Whether a path is one of the console's files, which are the same for everyone."""
    return path == "/console" or path.startswith("/console/")


def client_address(scope: Scope) -> str:
    """The client's address, "" if it is unknown."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def error_response(error: PolyloraError, path: str) -> JSONResponse:
    """An error of a middleware, in the format of the path's API."""
    reply = error_reply(error)
    return JSONResponse(error_body_for(reply, path), status_code=reply.status, headers=reply.headers)


def _is_loopback(address: Sequence[object] | None) -> bool:
    """`address`: (host, port), or None if the server does not know it."""
    if not address:
        return False
    try:
        found = ipaddress.ip_address(str(address[0]))
    except ValueError:
        return address[0] == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _is_own_name(host: str) -> bool:
    name = _without_port(host)
    return name == "localhost" or name.endswith(".localhost") or _is_loopback((name.strip("[]"), 0))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
