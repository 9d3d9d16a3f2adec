"""Adapters from object stores and web servers, through fsspec.

A URL must be under one of the operator's prefixes (`s3://bucket/{tenant}/`, `https://host/path/`), and so must every
hop of a redirect, with the same tenant. A web server's public name must have a public address. Only files of known
names are requested: nothing is listed or unpacked, and a download ends at its limit of bytes and seconds. Credentials
come from the environment, as each fsspec backend documents. Google's are looked up in this thread: gcsfs would do it
without a timeout in the thread that carries every transfer of this process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from fsspec import AbstractFileSystem, filesystem
from fsspec.asyn import get_loop
from fsspec.callbacks import Callback

from app.deployments.store.sources.addresses import ALLOW_PRIVATE, is_private_name, public_socket
from app.deployments.store.sources.source_patterns import prefixes_for
from app.deployments.store.sources.source_resolution import (
    Reserve,
    adapter_files,
    signature_name,
    unbounded,
)
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.signing.trusted_keys import SIGNATURE_SUFFIX
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterTooLarge, NotFound, PolyloraError, SourceError, UnsafeSource

MAX_REDIRECTS = 5
#: Names that are looked up at a time. A name server that hangs holds the threads of its own names only: this is more
#: than there are reads (`reader_pool.MAX_READERS`), with those that were given up and still wait for it.
_MAX_LOOKUPS = 512


class UrlFetcher:
    """A `Fetcher`. `options`: arguments of fsspec's file systems, by scheme; see also `ALLOW_PRIVATE`."""

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        options: Mapping[str, Mapping[str, Any]],
        max_bytes: int,
        timeout_s: float,
        signatures: bool = False,
        reserve: Reserve = unbounded,
    ) -> None:
        _look_up_in_threads()
        self._reserve = reserve
        self._signatures = signatures
        self._prefixes = tuple(prefixes)
        self._options = options
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    def accepts(self, uri: str) -> bool:
        return bool(prefixes_for(self._prefixes, uri))

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:  # noqa: ARG002
        """Raises SourceError, NotFound, AdapterTooLarge."""
        deadline_s = time.monotonic() + self._timeout_s
        names = adapter_files(uri)
        for name in names:
            self._fetch_file(
                uri if uri.endswith(f"/{name}") else f"{uri.rstrip('/')}/{name}", folder / name, deadline_s
            )
        for name in TEXT_FILES if len(names) > 1 else ():
            self._fetch_optional(f"{uri.rstrip('/')}/{name}", folder / name, deadline_s)
        if self._signatures:
            name = signature_name(names)
            url = uri + SIGNATURE_SUFFIX if len(names) == 1 else f"{uri.rstrip('/')}/{name}"
            with contextlib.suppress(NotFound):
                self._fetch_file(url, folder / name, deadline_s)
        return uri

    def _fetch_optional(self, url: str, file: Path, deadline_s: float) -> None:
        """A file that may be missing. Object stores that forbid listing answer PermissionError for a missing file."""
        try:
            with contextlib.suppress(NotFound):
                self._fetch_file(url, file, deadline_s)
        except SourceError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise

    def _fetch_file(self, url: str, file: Path, deadline_s: float) -> None:
        try:
            self._copy(url, file, deadline_s)
        except PolyloraError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"there is nothing at {url}") from error
        except Exception as error:
            # Each backend has its own exceptions; here they all mean a failed source.
            raise SourceError(f"cannot fetch {url}: {type(error).__name__}: {str(error)[:300]}") from error

    def _copy(self, url: str, file: Path, deadline_s: float) -> None:
        scheme = url.partition("://")[0]
        bound = _Bound(url, self._max_bytes, deadline_s, self._timeout_s)
        bound.reserve = lambda num_bytes: self._reserve(file.parent, num_bytes, 0.0)
        if scheme in ("http", "https"):
            self._copy_from_web(url, file, bound)
        elif scheme == "gs":
            # a higher concurrency would list the folder first
            _google_storage(self._options.get(scheme, {}), self._timeout_s).get_file(
                url, str(file), callback=bound, timeout=bound.left_s(), concurrency=1
            )
        else:
            files = filesystem(scheme, **self._options.get(scheme, {}))
            files.get_file(url, str(file), callback=bound, timeout=bound.left_s())
        bound.check(file.stat().st_size)

    def _copy_from_web(self, url: str, file: Path, bound: _Bound) -> None:
        """Follows redirects itself, after a check of each. Raises UnsafeSource."""
        allowed = prefixes_for(self._prefixes, url)
        for _ in range(MAX_REDIRECTS + 1):
            options = dict(self._options.get(url.partition("://")[0], {}))
            is_public = not (options.pop(ALLOW_PRIVATE, False) or is_private_name(urlsplit(url).hostname or ""))
            files = filesystem("http", **options, get_client=_public_client if is_public else _web_client)
            try:
                files.get_file(url, str(file), callback=bound, timeout=bound.left_s(), allow_redirects=False)
            except _RedirectError as redirect:
                target = urljoin(url, redirect.location)
                if not target.startswith(allowed) or ".." in unquote(urlsplit(target).path).split("/"):
                    raise UnsafeSource(
                        f"{url} redirects to {short(target)}, which no prefix of adapters.urls allows"
                    ) from None
                url = target
            else:
                return
        raise SourceError(f"{bound.url} redirects more than {MAX_REDIRECTS} times")


@cache
def _look_up_in_threads() -> None:
    """Give the loop on which fsspec runs every transfer of this process enough threads: by default it looks up six
    names at a time on a machine of two cores.
    """
    get_loop().set_default_executor(ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="name-lookup"))


class _RedirectError(Exception):
    """The server redirects to `location`, which may be relative."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


async def _raise_redirects(request: Any, send: Any) -> Any:
    """aiohttp's middleware: a redirect becomes a `_RedirectError`, whatever other headers say where to."""
    answer = await send(request)
    if 300 <= answer.status < 400:
        answer.close()
        location = answer.headers.get("Location")
        if not location:
            raise SourceError(f"{request.url} answered {answer.status} without a Location")
        raise _RedirectError(location)
    return answer


async def _web_client(**arguments: Any) -> Any:
    """The session of fsspec's file system for the web."""
    from aiohttp import ClientSession

    return ClientSession(middlewares=(_raise_redirects,), **arguments)


async def _public_client(**arguments: Any) -> Any:
    """The same, which connects to public addresses only."""
    from aiohttp import TCPConnector

    return await _web_client(connector=TCPConnector(socket_factory=public_socket), **arguments)


def _google_storage(options: Mapping[str, Any], timeout_s: float) -> AbstractFileSystem:
    """gcsfs with credentials that last for `timeout_s`: from `options`, else Google's default ones, else anonymous."""
    from gcsfs.core import GCSFileSystem  # the package's default class asks for the bucket's kind over gRPC
    from gcsfs.credentials import LOCAL_REFRESH_BUFFER
    from google.auth.exceptions import DefaultCredentialsError

    try:
        files = GCSFileSystem(**{"token": "google_default"} | dict(options))
    except DefaultCredentialsError:
        if "token" in options:
            raise
        files = GCSFileSystem(token="anon", **options)
    files.credentials.maybe_refresh(LOCAL_REFRESH_BUFFER + timeout_s)
    return files


class _Bound(Callback):  # type: ignore[misc]  # fsspec is not annotated
    """Ends a transfer that exceeds its bytes or seconds."""

    def __init__(self, url: str, max_bytes: int, deadline_s: float, timeout_s: float) -> None:
        super().__init__()
        self.url = url
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self.reserve: Callable[[int], None] = lambda _: None

    def left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise SourceError(f"{self.url} was not fetched within adapters.source_timeout_s {self._timeout_s:g}")
        return left_s

    def check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise AdapterTooLarge(
                f"{self.url} has {num_bytes} bytes but adapters.max_adapter_bytes allows {self._max_bytes}"
            )

    def set_size(self, size: int | None) -> None:
        """Called by fsspec when the length is known."""
        super().set_size(size)
        self.check(size or 0)
        self.reserve(size or 0)

    def call(self, *_: Any, **__: Any) -> None:
        """Called by fsspec after each piece."""
        self.check(self.value)
        self.left_s()
