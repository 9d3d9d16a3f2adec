"""Adapters from OCI registries: `oci://registry/repository:tag`, or `@sha256:…`.

A repository must be under one of the operator's prefixes (`oci://registry/{tenant}/`). The result is a URI with the
manifest's digest: a tag may move, what was registered does not. Credentials come from Docker's configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from app.deployments.store.sources.addresses import ALLOW_PRIVATE
from app.deployments.store.sources.oci.credentials import read_credentials
from app.deployments.store.sources.oci.files import ArtifactFiles, may_be_adapters
from app.deployments.store.sources.oci.manifest import Descriptor, Manifest, parse_manifest
from app.deployments.store.sources.oci.registry_client import RegistryAccess, RegistryClient
from app.deployments.store.sources.source_patterns import prefixes_for
from app.deployments.store.sources.source_resolution import OCI_URI, Reserve, unbounded
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterTooLarge, ConfigError, SourceError

_OPTIONS = {"plain_http": list, "token_hosts": list, ALLOW_PRIVATE: bool}


class OciFetcher:
    """A `Fetcher`. `options`: `adapters.url_options.oci`. `redirects`: the URL prefixes that blobs may be redirected
    to besides public places. `docker_config`: the file with credentials. Raises ConfigError for an unknown option.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        options: Mapping[str, Any],
        redirects: Sequence[str],
        docker_config: Path,
        max_bytes: int,
        timeout_s: float,
        reserve: Reserve = unbounded,
    ) -> None:
        for name, value in options.items():
            if name not in _OPTIONS or not isinstance(value, _OPTIONS[name]):
                raise ConfigError(
                    f"adapters.url_options: oci: {name}: {short(value)}; the options are plain_http and token_hosts, "
                    f"lists of host or host:port, and {ALLOW_PRIVATE}, true or false"
                )
        self._access = RegistryAccess(**options, prefixes=redirects)
        self._prefixes = tuple(prefixes)
        self._docker_config = docker_config
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._reserve = reserve

    def accepts(self, uri: str) -> bool:
        return bool(prefixes_for(self._prefixes, uri))

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:  # noqa: ARG002
        """Raises SourceError, NotFound, UnsafeSource, AdapterFormatError, AdapterTooLarge."""
        match = OCI_URI.fullmatch(uri)
        reference = match and (match["digest"] or match["tag"])
        if match is None or reference is None:
            raise SourceError(f"{short(uri)} is not of the form oci://registry/repository:tag, or @sha256:...")
        credentials = read_credentials(self._docker_config, match["host"])
        client = RegistryClient(match["host"], match["path"][1:], self._access, credentials)
        try:
            digest = asyncio.run(self._pull(client, uri, reference, folder))
        except TimeoutError as error:
            raise self._too_slow(uri) from error
        except (ClientError, ValueError) as error:  # ValueError: a server's headers, or a URL that is none
            raise SourceError(f"cannot fetch {uri}: {type(error).__name__}: {str(error)[:300]}") from error
        return f"oci://{match['host']}{match['path']}@{digest}"

    async def _pull(self, client: RegistryClient, uri: str, reference: str, folder: Path) -> str:
        deadline_s = time.monotonic() + self._timeout_s
        files = folder / "layers"
        files.mkdir()
        artifact = ArtifactFiles(files, self._max_bytes, lambda num_bytes: self._reserve(folder, num_bytes, 0.0))
        async with asyncio.timeout(self._timeout_s), client:
            digest, manifest = await _resolve(client, uri, reference)
            layers = [each for each in manifest.layers if each.path is None or may_be_adapters(each.path)]
            self._check_sizes(uri, layers)
            self._reserve(folder, sum(layer.size_bytes for layer in layers), self._timeout_s)
            for layer in layers:
                await client.blob(layer, file := artifact.new_file())
                if layer.path is None:
                    artifact.add_archive(file, layer.compression, lambda: self._check_deadline(uri, deadline_s))
                else:
                    artifact.add_file(layer.path, file)
        types = ", ".join(sorted(set(manifest.media_types)))
        artifact.move_adapter_to(folder, f"{uri} ({len(manifest.media_types)} layers: {types[:500]})")
        return digest

    def _check_sizes(self, uri: str, layers: Sequence[Descriptor]) -> None:
        for layer in layers:
            if layer.size_bytes > self._max_bytes:
                raise AdapterTooLarge(
                    f"{layer.path or layer.digest} of {uri} has {layer.size_bytes} bytes but "
                    f"adapters.max_adapter_bytes allows {self._max_bytes}"
                )

    def _check_deadline(self, uri: str, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise self._too_slow(uri)

    def _too_slow(self, uri: str) -> SourceError:
        return SourceError(f"{uri} was not fetched within adapters.source_timeout_s {self._timeout_s:g}")


async def _resolve(client: RegistryClient, uri: str, reference: str) -> tuple[str, Manifest]:
    """(digest of what the reference names, its image manifest). An index must list one manifest."""
    digest, contents = await client.manifest(reference)
    manifest = parse_manifest(contents, f"the manifest of {uri}")
    if not manifest.manifests:
        return digest, manifest
    if len(manifest.manifests) > 1:
        raise AdapterFormatError(
            f"{uri} is an index of {len(manifest.manifests)} manifests; name one of them: "
            f"{', '.join(each.digest for each in manifest.manifests[:8])}"
        )
    only = manifest.manifests[0].digest
    inner = parse_manifest((await client.manifest(only))[1], f"the manifest {only} of {uri}")
    if inner.manifests:
        raise AdapterFormatError(f"{uri} is an index of an index; name the manifest's digest")
    return digest, inner
