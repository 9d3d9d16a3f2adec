"""Reading adapters, the blocking half of the store: from a source, or from this machine's disk, to a packed adapter.

Local folders are read in place; what comes over a network is downloaded, read, and only then kept on disk under its
digest. The sandboxed validator interprets an adapter's bytes, not this process. Concurrency is limited by the callers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from app.config import AdaptersConfig
from app.deployments.registry.models import DEFAULT_TENANT, State
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.sources.fetch_timeout import FetchTimeout, FolderTimeout
from app.deployments.store.sources.hub import HubFetcher, OwnToken, no_token
from app.deployments.store.sources.oci.credentials import docker_config_path
from app.deployments.store.sources.oci.fetcher import OciFetcher
from app.deployments.store.sources.plugin import PluginFetcher
from app.deployments.store.sources.source_resolution import (
    LOCAL_LANE,
    Fetcher,
    LocalSource,
    Reserve,
    Sources,
    adapter_path,
    clean_download,
    unbounded,
)
from app.deployments.store.sources.urls import UrlFetcher
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.adapter_chat import AdapterTokenizerDedup
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.combining.combination import Combination
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits
from app.engine.adapters.sandbox.validator import Validator, files_identity
from app.engine.adapters.signing.signing import signer_of
from app.engine.errors import AdapterError, AdapterReadFailed, AdapterUntrusted, ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.spec import ModelSpec
from app.engine.models.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

R = TypeVar("R")


class LocatedAdapter(NamedTuple):
    """A packed adapter, its canonical source, and the public key that signed it (None: unsigned)."""

    uri: str
    packed: PackedAdapter
    signer: str | None = None


class AdapterReader:
    """Called from any thread."""

    def __init__(
        self,
        sources: Sources,
        disk: DiskTier,
        validator: Validator,
        spec: ModelSpec,
        counts: TierCounters,
        events: TierEvents,
        *,
        signatures: bool = False,
        base_copies: BaseWeightDedup | None = None,
        tokenizer_dedup: AdapterTokenizerDedup | None = None,
        source_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`signatures`: whether `from_source` checks signatures. `base_copies` and `tokenizer_dedup` drop what equals
        the base model's. `source_timeout_s`: how long a local folder's file system may take.
        """
        self._clock = clock
        self._sources = sources
        self._disk = disk
        self._validator = validator
        self._spec = spec
        self.counts = counts
        self._signatures = signatures
        self._base_copies = base_copies
        self._tokenizer_dedup = tokenizer_dedup
        self._events = events
        self._folders = FolderTimeout(source_timeout_s)

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these on disk."""
        self._disk.pin(digests)

    def close(self) -> None:
        self._validator.close()
        self._disk.close()

    def lane(self, source: str) -> str:
        """The lane of a source: a host, a bucket or the local folders; reads of one lane share a limit."""
        return self._sources.lane(source)

    def host(self, source: str) -> str:
        """The host of a source; reads of one host share the threads that may hang together."""
        return self._sources.host(source)

    def abandon(self, source: str) -> None:
        """End downloads from this source with FetchAbandoned: no caller waits for them."""
        self._sources.abandon(source)

    def version(self, source: str, tenant_id: str = DEFAULT_TENANT) -> str:
        """A text that changes when a local source is overwritten; empty for other sources. One read serves all callers
        with one version.

        Raises UnsafeSource, NotFound, and SourceError if its file system hangs.
        """
        return self._look(source, tenant_id, partial(self._version, source))

    def from_source(self, source: str, tenant_id: str = DEFAULT_TENANT) -> LocatedAdapter:
        """Read for a tenant: with its rights, in its share of staging space.

        Raises UnsafeSource, NotFound, SourceError, AdapterError (AdapterUntrusted if a signature does not fit).
        """
        found = self._look(source, tenant_id, partial(self._sources.locate, source))
        if isinstance(found, LocalSource):
            read_s = self._validator.reader_limits.seconds(self._validator.limits.max_weight_bytes)
            return self._folders.call(source, tenant_id, partial(self._from_folder, source, found), read_s)
        started_s = self._clock()
        with self._disk.staging(tenant_id) as folder:
            uri = found.fetch(folder, tenant_id)
            path = clean_download(folder)
            load_s = self._clock() - started_s
            self._events.on_progress(source, State.VALIDATING)
            packed = self._read(path)
            self.counts.record_load("source", load_s, packed.card.size_bytes, packed.card.digest)
            signer = self._signer(path, packed)
            try:
                if not self._disk.keep(packed.card.digest, folder, load_s):
                    logger.warning("the adapter from %s is not kept on disk: pinned adapters leave no room", uri)
                self._events.on_progress(source, State.ON_DISK)
            except OSError as error:  # a full disk costs the next download, not this request
                logger.warning("the adapter from %s is not kept on disk: %s", uri, error)
        return LocatedAdapter(uri, packed, signer)

    def from_disk(self, digest: str, source: str) -> PackedAdapter | None:
        """The adapter with this digest if this machine's disk has it; local sources never are."""
        if self._sources.is_local(source):
            return None
        started_s = self._clock()
        with self._disk.reading(digest) as folder:
            if folder is None:
                return None
            try:
                packed = self._read(adapter_path(folder))
                is_whole = packed.card.digest == digest
            except AdapterReadFailed:
                raise
            except AdapterError:
                is_whole = False
        if not is_whole:  # damaged on disk: read the source again
            self._disk.remove(digest)
            return None
        self.counts.record_load("disk", self._clock() - started_s, packed.card.size_bytes, digest)
        return packed

    def combine(self, combination: Combination, parts: Sequence[PackedAdapter]) -> PackedAdapter:
        """See `Validator.combine`."""
        return self._validator.combine(combination, parts, self._spec)

    def _look(self, source: str, tenant_id: str, look: Callable[[], R]) -> R:
        """Look at a source, with the time limit of local folders if it is one."""
        return self._folders.call(source, tenant_id, look) if self.lane(source) == LOCAL_LANE else look()

    def _version(self, source: str) -> str:
        found = self._sources.locate(source)
        return str(files_identity(found.path)) if isinstance(found, LocalSource) else ""

    def _from_folder(self, source: str, found: LocalSource) -> LocatedAdapter:
        started_s = self._clock()
        before = files_identity(found.path)
        self._events.on_progress(source, State.VALIDATING)
        packed = self._read(found.path)
        self._events.on_progress(source, State.ON_DISK)
        if files_identity(found.path) != before:
            raise AdapterReadFailed(f"{found.uri} changed while it was read; register it again once it is complete")
        self.counts.record_load("source", self._clock() - started_s, packed.card.size_bytes, packed.card.digest)
        return LocatedAdapter(found.uri, packed, self._signer(found.path, packed))

    def _signer(self, path: Path, packed: PackedAdapter) -> str | None:
        return signer_of(path, packed.card.digest) if self._signatures else None

    def _read(self, path: Path) -> PackedAdapter:
        packed = self._validator.read(path, self._spec)
        if self._base_copies is not None:
            packed = self._base_copies.without_copies_packed(packed)
        if self._tokenizer_dedup is not None:
            packed = self._tokenizer_dedup.strip_base_packed(packed)
        # The size of a resized vocabulary is in the text, too, and comes from the weights.
        if self._signatures and any(AdapterTokenizer.from_json(packed.card.text)._replace(vocab_size=0)):
            raise AdapterUntrusted(
                "the adapter has a chat template, special tokens or generation defaults of its own, which signatures "
                "do not cover; remove its tokenizer files and its generation_config.json from the folder"
            )
        return packed


def open_adapter_reader(
    config: AdaptersConfig,
    checkpoint: Checkpoint,
    supported_features: frozenset[str],
    counts: TierCounters,
    events: TierEvents,
    *,
    pinned: Collection[str] = (),
    uploads: Callable[[str], Path | None] = lambda _: None,
    own_token: OwnToken = no_token,
) -> AdapterReader:
    """The configured sources, the disk tier in `state_dir`, and a reader process. Raises ConfigError.

    `events` receives the progress of reading and what leaves the disk. `pinned`: digests that stay on disk. `uploads`:
    the folder of an uploaded adapter, by its digest. `own_token`: a project's own token for the hub.
    """
    spec = checkpoint.spec
    root = Path(config.state_dir).resolve() / f"adapters-{spec.digest[:12]}"
    disk = DiskTier(root, config.disk_cache_bytes, config.disk_eviction, counts, events, pinned=pinned)
    try:
        sources = open_sources(config, base_name=spec.name, reserve=disk.reserve, uploads=uploads, own_token=own_token)
    except ConfigError:
        disk.close()
        raise
    validator = Validator(
        ReadLimits(max_weight_bytes=config.max_adapter_bytes, max_rank=config.max_rank),
        ReaderLimits(base_memory_bytes=config.parser_memory_bytes, base_s=config.parser_timeout_s),
        supported_features=supported_features,
    )
    return AdapterReader(
        sources,
        disk,
        validator,
        spec,
        counts,
        events,
        signatures=config.signing.trust.is_enabled,
        base_copies=BaseWeightDedup(checkpoint, supported_features),
        tokenizer_dedup=AdapterTokenizerDedup(lambda: load_tokenizer(checkpoint.tokenizer_source), spec),
        source_timeout_s=config.source_timeout_s,
    )


def open_sources(
    config: AdaptersConfig,
    environ: Mapping[str, str] | None = None,
    *,
    base_name: str,
    reserve: Reserve = unbounded,
    uploads: Callable[[str], Path | None] = lambda _: None,
    own_token: OwnToken = no_token,
) -> Sources:
    """URLs first, then the custom fetcher or the hub, each with a timeout. Raises ConfigError if the fetcher cannot be
    imported.

    The environment may set LORA_HF_TOKEN, LORA_DOWNLOADER_PLUGIN and DOCKER_CONFIG. `reserve` reserves disk space for
    announced sizes; a custom fetcher announces none. `base_name`: the base model's name for clients, for the fetcher.
    `uploads`: the folder of an uploaded adapter, by its digest.
    """
    environ = os.environ if environ is None else environ
    max_bytes, timeout_s = config.max_adapter_bytes, config.source_timeout_s
    fetchers: list[Fetcher] = []
    registries = tuple(prefix for prefix in config.urls if prefix.startswith("oci://"))
    urls = tuple(prefix for prefix in config.urls if prefix not in registries)
    if registries:
        fetchers.append(
            OciFetcher(
                registries,
                options=config.url_options.get("oci", {}),
                redirects=urls,
                docker_config=docker_config_path(environ),
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                reserve=reserve,
            )
        )
    if urls:
        fetchers.append(
            UrlFetcher(
                urls,
                options=config.url_options,
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                signatures=config.signing.trust.is_enabled,
                reserve=reserve,
            )
        )
    custom_fetcher = config.custom_fetcher or environ.get("LORA_DOWNLOADER_PLUGIN")
    if custom_fetcher:
        fetchers.append(PluginFetcher(custom_fetcher, base_name))
    elif config.hub != ():
        resolvers = [text for text in config.resolvers or () if text.startswith("hf://")]
        fetchers.append(
            HubFetcher(
                config.hub_endpoint,
                environ.get("LORA_HF_TOKEN"),
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                reserve=reserve,
                patterns=config.hub,
                own_token=own_token,
                resolved=[text[len("hf://") :].partition("@")[0].replace("{name}", "*") for text in resolvers],
            )
        )
    timed = [FetchTimeout(fetcher, timeout_s) for fetcher in fetchers]

    def abandon(uri: str) -> None:
        for fetcher in timed:
            fetcher.abandon(uri)

    return Sources([Path(root) for root in config.roots], timed, abandon, uploads)
