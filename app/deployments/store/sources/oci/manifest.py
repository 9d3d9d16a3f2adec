"""Manifests of the OCI image specification, and which of their layers may hold an adapter's files.

Known layouts: a layer per file with its name in the annotation `org.opencontainers.image.title` (ORAS) or
`org.cncf.model.filepath` (CNCF ModelPack); tar archives, also compressed by gzip or zstd (KitOps, ModelPack, folders
pushed by ORAS, images).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from app.deployments.store.sources.oci.archive import safe_path
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError

#: What a registry may answer for a tag or digest.
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
#: The specification lets registries refuse larger manifests.
MAX_MANIFEST_BYTES = 4 << 20
_MAX_ENTRIES = 4096
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_TAR = re.compile(r"[.+]tar(?:[+.](?P<compression>gzip|zstd))?")
_PATHS = ("org.opencontainers.image.title", "org.cncf.model.filepath", "org.cnai.model.filepath")
#: ORAS: whether a layer with a title is a packed folder.
_UNPACK = "io.deis.oras.content.unpack"
#: Layers of model packages, whose titles do not say that they are plain files.
_PACKAGES = re.compile(r"application/vnd\.(kitops\.modelkit|cncf\.model|cnai\.model)\.(?P<part>\w+)")
_OTHER_PARTS = frozenset({"dataset", "code", "doc", "docs", "prompt"})


class Descriptor(NamedTuple):
    """A blob or manifest: its digest ("sha256:…") and size. `path`: the file that a layer is; None: an archive."""

    digest: str
    size_bytes: int
    path: str | None = None
    compression: str = ""


class Manifest(NamedTuple):
    """Either the layers that may hold an adapter's files, or the manifests that an index lists."""

    layers: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()
    #: Media types of all layers, for errors.
    media_types: tuple[str, ...] = ()


def parse_manifest(contents: bytes, what: str) -> Manifest:
    """AdapterFormatError if it is no manifest or index of version 2; `what` names it."""
    document = parse_object(contents, what)
    if document.get("schemaVersion") != 2:
        raise AdapterFormatError(f"{what}: schemaVersion {short(document.get('schemaVersion'))}; only 2 is read")
    if ("layers" in document) == ("manifests" in document):
        raise AdapterFormatError(f"{what} is no image manifest or index: it needs either 'layers' or 'manifests'")
    if "manifests" in document:
        entries = _objects(document["manifests"], what)
        return Manifest(manifests=tuple(_descriptor(each, what) for each in entries if not _is_attestation(each)))
    entries = _objects(document["layers"], what)
    types = tuple(str(each.get("mediaType"))[:200] for each in entries)
    return Manifest(tuple(layer for each in entries if (layer := _layer(each, what)) is not None), (), types)


def _layer(entry: dict[str, Any], what: str) -> Descriptor | None:
    """None for a layer that cannot hold an adapter's files, which is not downloaded."""
    media_type = str(entry.get("mediaType"))
    package = _PACKAGES.match(media_type)
    if package is not None and package["part"] in _OTHER_PARTS:
        return None
    annotations = entry.get("annotations")
    annotations = annotations if isinstance(annotations, dict) else {}
    path = next((value for key in _PATHS if isinstance(value := annotations.get(key), str)), None)
    tar = _TAR.search(media_type)
    is_packed = package is not None or annotations.get(_UNPACK) == "true"
    if tar is not None and (path is None or is_packed):
        return _descriptor(entry, what)._replace(compression=tar["compression"] or "")
    return None if path is None else _descriptor(entry, what)._replace(path=safe_path(path))


def _is_attestation(entry: dict[str, Any]) -> bool:
    """BuildKit lists provenance beside images, for the platform unknown/unknown."""
    platform = entry.get("platform")
    return isinstance(platform, dict) and platform.get("os") == "unknown"


def _objects(entries: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or len(entries) > _MAX_ENTRIES or not all(isinstance(e, dict) for e in entries):
        raise AdapterFormatError(f"{what} does not list at most {_MAX_ENTRIES} layers or manifests")
    return entries


def _descriptor(entry: dict[str, Any], what: str) -> Descriptor:
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise AdapterFormatError(f"{what}: digest {short(digest)}; only sha256:… is read")
    if type(size) is not int or size < 0:
        raise AdapterFormatError(f"{what}: {digest} has size {short(size)}, not a number of bytes")
    return Descriptor(digest, size)
