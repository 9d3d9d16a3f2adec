"""Sessions of the web console: a cookie that stands for an API key for some hours, instead of the key itself.

The cookie holds the key's id, an expiry and an HMAC, so no process remembers sessions, and a revoked key ends its own.
Pages cannot read it (HttpOnly), browsers send it to no other site's requests (SameSite=Strict), and it counts only with
the header that the console's scripts set: a form or a link of another page cannot act with it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import HTTPConnection

from app.deployments.ingress.error_responses import InvalidApiKey
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror

COOKIE = "polylora_session"
#: The console sends it with every request; without it the cookie is ignored.
CONSOLE_HEADER = "X-Polylora-Console"
#: The id of the admin key that comes from the environment.
ENVIRONMENT_KEY = "key_environment"
#: How soon the secret is fetched again after a cookie that it did not sign.
REFETCH_S = 5.0
_COOKIE = re.compile(r"([A-Za-z0-9_-]{1,80})\.(\d{1,11})\.([0-9a-f]{64})")


class Session(NamedTuple):
    """A signed-in key and when its session ends (Unix time)."""

    key_id: str
    expires_s: int


class ConsoleSessions:
    """`fetch_secret` gets the secret that all ingresses share; `clock` gives Unix time. `admin_digest`: SHA-256 of the
    environment's admin key."""

    def __init__(
        self,
        fetch_secret: Callable[[], Awaitable[bytes]],
        view: TenantMirror,
        clock: Callable[[], float],
        admin_digest: str | None = None,
    ) -> None:
        self._fetch_secret = fetch_secret
        self._view = view
        self._clock = clock
        self._admin_digest = admin_digest
        self._secret: bytes | None = None
        self._fetched_s = 0.0

    async def cookie(self, session: Session) -> str:
        """The cookie's value. Raises NotReady while the store restarts."""
        return f"{session.key_id}.{session.expires_s}.{self._mac(session, await self._current_secret())}"

    async def of(self, connection: HTTPConnection) -> Session | None:
        """The session of a console's request, or None if it has none. Raises InvalidApiKey if it has ended, and
        NotReady."""
        value = connection.cookies.get(COOKIE, "")
        if not value or CONSOLE_HEADER not in connection.headers:
            return None
        found = _COOKIE.fullmatch(value)
        session = Session(found[1], int(found[2])) if found else None
        if found is None or session is None or session.expires_s <= self._clock():
            raise InvalidApiKey("the session has ended; sign in again")
        if hmac.compare_digest(found[3], self._mac(session, await self._current_secret())):
            return session
        if self._clock() - self._fetched_s > REFETCH_S:  # the store may have restarted since
            self._secret, self._fetched_s = await self._fetch_secret(), self._clock()  # kept if the store is away
            if hmac.compare_digest(found[3], self._mac(session, self._secret)):
                return session
        raise InvalidApiKey("the session has ended; sign in again")

    async def _current_secret(self) -> bytes:
        if self._secret is None:
            self._secret = await self._fetch_secret()
            self._fetched_s = self._clock()
        return self._secret

    def _mac(self, session: Session, secret: bytes) -> str:
        """Also over the key's digest: an id whose key was replaced has other sessions."""
        digest = (
            self._admin_digest
            if session.key_id == ENVIRONMENT_KEY
            else getattr(self._view.key(session.key_id), "digest", None)
        )
        text = f"console session\0{session.key_id}\0{session.expires_s}\0{digest}"
        return hmac.digest(secret, text.encode(), "sha256").hex()
