"""A client for one repository of a registry, by the OCI distribution specification 1.1: reads manifests and blobs.

What arrives is compared with its digest and size before it is used. Blobs may be redirected to a store elsewhere, to
public addresses or below the operator's prefixes; manifests may not, since a tag's manifest is not bound to a digest.
Authorization is sent to the registry alone, and the password to it or to its token server.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector
from yarl import URL

from app.deployments.store.sources.addresses import is_private_name, public_socket
from app.deployments.store.sources.oci.credentials import DOCKER_HUB, DOCKER_HUB_API, Credentials
from app.deployments.store.sources.oci.manifest import MANIFEST_TYPES, MAX_MANIFEST_BYTES, Descriptor
from app.deployments.store.sources.source_patterns import prefixes_for
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError, NotFound, SourceError, UnsafeSource

_MAX_REDIRECTS = 5
_MAX_ANSWER_BYTES = 1 << 20  # of errors and tokens
_CHUNK = 1 << 20
#: A scheme before its parameters, or a parameter, of the header WWW-Authenticate.
_CHALLENGE = re.compile(
    r'\b([A-Za-z]{1,32}) {1,8}(?=[a-z_]{1,32}=)|\b([a-z_]{1,32})="([^"]{0,4096})"|\b([a-z_]{1,32})=([^\s,"]{1,4096})'
)


class RegistryAccess(NamedTuple):
    """The operator's rules: registries (`host:port`) without TLS, hosts that may have a registry's credentials for a
    token, whether any name may have a private address, and the prefixes of URLs that blobs may be redirected to.
    """

    plain_http: Sequence[str] = ()
    token_hosts: Sequence[str] = ()
    allow_private_addresses: bool = False
    prefixes: Sequence[str] = ()


class RegistryClient:
    """`registry`: host or host:port. Methods raise SourceError, NotFound and UnsafeSource, and aiohttp's errors."""

    def __init__(self, registry: str, repository: str, access: RegistryAccess, credentials: Credentials) -> None:
        self._name = f"{registry}/{repository}"
        self._repository = repository
        self._access = access
        self._credentials = credentials
        scheme = "http" if registry in access.plain_http else "https"
        self._origin = URL(f"{scheme}://{DOCKER_HUB_API if registry == DOCKER_HUB else registry}")
        self._authorization = f"Bearer {credentials.registry_token}" if credentials.registry_token else None

    async def __aenter__(self) -> Self:
        public = functools.partial(public_socket, scheme="oci")
        self._public = _session(TCPConnector(socket_factory=public))
        self._any = _session(TCPConnector())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._public.close()
        await self._any.close()

    async def manifest(self, reference: str) -> tuple[str, bytes]:
        """(digest, contents) of the manifest with this tag or digest."""
        url = self._origin / "v2" / self._repository / "manifests" / reference
        async with self._get(url, ", ".join(MANIFEST_TYPES), max_redirects=0) as answer:
            contents = await _read(answer, MAX_MANIFEST_BYTES)
            stated = reference if ":" in reference else answer.headers.get("Docker-Content-Digest")
        digest = f"sha256:{hashlib.sha256(contents).hexdigest()}"
        if stated is not None and stated.startswith("sha256:") and stated != digest:
            raise SourceError(f"the manifest {reference} of {self._name} has {digest}, but should have {short(stated)}")
        return digest, contents

    async def blob(self, blob: Descriptor, file: Path) -> None:
        """Download a blob into a new file. Raises SourceError if its digest or size is another."""
        url = self._origin / "v2" / self._repository / "blobs" / blob.digest
        digest, num_bytes = hashlib.sha256(), 0
        async with self._get(url, "*/*", _MAX_REDIRECTS) as answer:
            with file.open("xb") as target:
                async for chunk in answer.content.iter_chunked(_CHUNK):
                    num_bytes += len(chunk)
                    if num_bytes > blob.size_bytes:
                        break
                    digest.update(chunk)
                    target.write(chunk)
        if num_bytes != blob.size_bytes or f"sha256:{digest.hexdigest()}" != blob.digest:
            raise SourceError(
                f"the blob {blob.digest} of {self._name} has other contents: sha256:{digest.hexdigest()} after "
                f"{num_bytes} bytes, and its manifest says {blob.size_bytes} bytes"
            )

    @asynccontextmanager
    async def _get(self, url: URL, accept: str, max_redirects: int) -> AsyncIterator[ClientResponse]:
        has_asked, num_redirects = False, 0
        while True:
            is_own = _origin(url) == _origin(self._origin)
            headers = {"Accept": accept}
            if is_own and self._authorization is not None:
                headers["Authorization"] = self._authorization
            async with self._session(url).get(url, headers=headers, allow_redirects=False) as answer:
                if answer.status == 401 and is_own and not has_asked:
                    has_asked = True
                    self._authorization = await self._authorize(answer.headers.getall("WWW-Authenticate", []))
                    continue
                if 300 <= answer.status < 400:
                    num_redirects += 1
                    if num_redirects > max_redirects:
                        raise SourceError(f"{_without_query(url)} redirects, which may happen {max_redirects} times")
                    url = self._redirect_target(url, answer.headers.get("Location", ""))
                    continue
                await self._check(answer)
                yield answer
                return

    def _session(self, url: URL) -> ClientSession:
        host = url.host or ""
        is_named = (
            _origin(url) == _origin(self._origin)
            or _authority(url) in self._access.token_hosts
            or bool(prefixes_for(self._access.prefixes, str(url)))
        )
        is_private = self._access.allow_private_addresses or (is_named and is_private_name(host))
        return self._any if is_private else self._public

    def _redirect_target(self, url: URL, location: str) -> URL:
        target = _absolute(url, location)
        is_allowed = target is not None and (
            target.scheme == "https"
            or _origin(target) == _origin(self._origin)
            or bool(prefixes_for(self._access.prefixes, str(target)))
        )
        if target is None or not is_allowed or ".." in unquote(target.path).split("/"):
            raise UnsafeSource(
                f"{_without_query(url)} redirects to {_without_query(location)}: neither https nor below a prefix of "
                "adapters.urls"
            )
        return target

    async def _authorize(self, headers: Sequence[str]) -> str:
        """The header `Authorization` that answers the registry's challenge. NotFound without fitting credentials."""
        challenges = _challenges(headers)
        if "bearer" in challenges:
            return f"Bearer {await self._token(challenges['bearer'])}"
        if "basic" in challenges and self._credentials.basic is not None:
            return self._credentials.basic
        raise NotFound(self._unseen(401))

    async def _token(self, challenge: dict[str, str]) -> str:
        url = _absolute(self._origin, challenge.get("realm", ""))
        plain = url is not None and url.scheme == "http" and _authority(url) in self._access.plain_http
        if url is None or not (url.scheme == "https" or plain):
            raise UnsafeSource(f"{self._name} has its tokens at {short(challenge.get('realm'))}, which is not https")
        fields = {"scope": challenge.get("scope") or f"repository:{self._repository}:pull"}
        if "service" in challenge:
            fields["service"] = challenge["service"]
        credentials = self._credentials
        if credentials.identity_token or credentials.basic is not None:
            self._check_token_host(url)
        session = self._session(url)
        if credentials.identity_token:
            fields |= {"grant_type": "refresh_token", "refresh_token": credentials.identity_token}
            request = session.post(url, data=fields | {"client_id": "polylora"}, allow_redirects=False)
        else:
            auth = {} if credentials.basic is None else {"Authorization": credentials.basic}
            request = session.get(url.update_query(fields), headers=auth, allow_redirects=False)
        async with request as answer:
            await self._check(answer)
            document = _object(await _read(answer, _MAX_ANSWER_BYTES), f"the token from {url.host}")
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str) or re.fullmatch(r"[!-~]+", token) is None:
            raise SourceError(f"{url.host} gave no token for {self._name}")
        return token

    def _check_token_host(self, url: URL) -> None:
        """A registry's password goes to its own host, or to one of the same domain: auth.docker.io, gitlab.com."""
        own, other = self._origin.host or "", url.host or ""
        domain = own.partition(".")[2]
        is_own = _origin(url) == _origin(self._origin) or (
            "." in domain and not is_private_name(own) and (other == domain or other.partition(".")[2] == domain)
        )
        if not is_own and _authority(url) not in self._access.token_hosts:
            raise UnsafeSource(
                f"{self._name} wants its credentials sent to {_authority(url)}; if that is intended, set "
                f"adapters.url_options: {{oci: {{token_hosts: [{_authority(url)}]}}}}"
            )

    async def _check(self, answer: ClientResponse) -> None:
        if answer.status in (401, 403, 404):
            raise NotFound(self._unseen(answer.status) + await _reason(answer))
        if answer.status != 200:
            raise SourceError(f"{answer.url.host} answered {answer.status} for {self._name}" + await _reason(answer))

    def _unseen(self, status: int) -> str:
        helper = ", and its credential helper is not run" if self._credentials.has_helper else ""
        who = "these credentials" if self._credentials[:4] != Credentials()[:4] else "anonymous clients"
        return f"the registry has no {self._name}, or {who} may not see it ({status}{helper})"


def _origin(url: URL) -> tuple[str, str | None, int | None]:
    return url.scheme, url.host, url.port


def _authority(url: URL) -> str:
    """`host`, or `host:port` if the port is not the scheme's."""
    return url.host or "" if url.is_default_port() else f"{url.host}:{url.port}"


def _without_query(url: URL | str) -> str:
    """Without its query, which signs a request to a store."""
    return short(str(url).partition("?")[0])


def _session(connector: TCPConnector) -> ClientSession:
    """Without decompression, proxies and .netrc of the environment: each would be outside of the rules above."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "polylora"}
    return ClientSession(
        connector=connector, headers=headers, auto_decompress=False, timeout=ClientTimeout(total=None, sock_connect=30)
    )


async def _read(answer: ClientResponse, max_bytes: int) -> bytes:
    contents = bytearray()
    async for chunk in answer.content.iter_chunked(_CHUNK):
        contents += chunk
        if len(contents) > max_bytes:
            raise SourceError(f"{answer.url.host} answered with more than {max_bytes} bytes")
    return bytes(contents)


async def _reason(answer: ClientResponse) -> str:
    """The first error of a registry's answer, as the specification defines it; empty if there is none."""
    try:
        errors: Any = _object(await _read(answer, _MAX_ANSWER_BYTES), "the answer").get("errors")
        return f": {short(errors[0]['code'])}, {short(errors[0].get('message'))}"
    except (SourceError, LookupError, TypeError, AttributeError):
        return ""


def _object(contents: bytes, what: str) -> dict[str, Any]:
    try:
        return parse_object(contents, what)
    except AdapterFormatError as error:
        raise SourceError(str(error)) from error


def _absolute(base: URL, location: str) -> URL | None:
    """The URL of a header, which may be relative. None for an invalid one, or with a user name."""
    try:
        url = base.join(URL(location, encoded=True)) if location else None
        is_web = url is not None and url.scheme in ("http", "https") and bool(url.host) and url.user is None
        return url if is_web and url is not None and url.port is not None else None
    except ValueError:
        return None


def _challenges(headers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Scheme in lower case -> parameters. A scheme without parameters is left out, but Basic, which needs none."""
    found: dict[str, dict[str, str]] = {}
    for header in headers:
        if header.strip().lower() == "basic":
            found["basic"] = {}
        parameters: dict[str, str] = {}
        for scheme, key, quoted, other, plain in _CHALLENGE.findall(header):
            if scheme:
                parameters = found.setdefault(scheme.lower(), {})
            else:
                parameters.setdefault(key or other, quoted or plain)
    return found
