"""From a source, or from this machine's disk, to a packed adapter: the blocking half of the store.

In: what a client or the configuration calls an adapter's source, or the digest of one that was here before.
Out: a `LocatedAdapter`. Local folders are read where they are; what comes over a network is downloaded,
read, and only then kept on disk under its digest. Nothing here interprets an adapter's bytes (the
validator has another process do it). Who waits for whom, and how many at once, is the store's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from app.config import AdaptersConfig
from app.deployments.registry.models import State
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.sources.factory import open_sources
from app.deployments.store.sources.source_resolution import LocalPlace, Sources, adapter_path, delivered
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.adapter_chat import AdapterTokenizerCache
from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.limits import ReadLimits
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits
from app.engine.adapters.sandbox.validator import Validator, files_identity
from app.engine.adapters.signing.signing import signer_of
from app.engine.errors import AdapterError, AdapterReadFailed, AdapterUntrusted, ConfigError
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.spec import ModelSpec
from app.engine.models.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


class LocatedAdapter(NamedTuple):
    """A read adapter, the canonical place it came from, and the public key that signed it (None: nobody)."""

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
        texts: AdapterTokenizerCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`signatures`: whether `from_source` looks for them. `base_copies`, `texts`: drop what is the base's own."""
        self._clock = clock
        self._sources = sources
        self._disk = disk
        self._validator = validator
        self._spec = spec
        self.counts = counts
        self._signatures = signatures
        self._base_copies = base_copies
        self._texts = texts
        self._events = events

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these on disk."""
        self._disk.pin(digests)

    def close(self) -> None:
        self._validator.close()
        self._disk.close()

    def lane(self, source: str) -> str:
        """Sources in one lane share a limit and may delay each other: one host, one bucket, the local folders."""
        return self._sources.lane(source)

    def host(self, source: str) -> str:
        """What may hang together has a share of the threads."""
        return self._sources.host(source)

    def abandon(self, source: str) -> None:
        """Nobody wants this source any more: what is being downloaded from it ends with SourceError."""
        self._sources.abandon(source)

    def version(self, source: str) -> str:
        """Changes when a local source is overwritten, empty for others; one read may serve all who ask for one version.

        Raises UnsafeSource, NotFound.
        """
        place = self._sources.locate(source)
        return str(files_identity(place.path)) if isinstance(place, LocalPlace) else ""

    def from_source(self, source: str) -> LocatedAdapter:
        """Raises UnsafeSource, NotFound, SourceError, AdapterError (AdapterUntrusted if a signature does not fit)."""
        place = self._sources.locate(source)
        started_s = self._clock()
        if isinstance(place, LocalPlace):
            before = files_identity(place.path)
            self._events.reached(source, State.VALIDATING)
            packed = self._read(place.path)
            self._events.reached(source, State.ON_DISK)
            if files_identity(place.path) != before:
                raise AdapterReadFailed(f"{place.uri} changed while it was read; register it when it is complete")
            self.counts.loaded("source", self._clock() - started_s, packed.card.size_bytes, packed.card.digest)
            return LocatedAdapter(place.uri, packed, self._signer(place.path, packed))
        with self._disk.staging() as folder:
            uri = place.fetch(folder)
            path = delivered(folder)
            load_s = self._clock() - started_s
            self._events.reached(source, State.VALIDATING)
            packed = self._read(path)
            self.counts.loaded("source", load_s, packed.card.size_bytes, packed.card.digest)
            signer = self._signer(path, packed)
            try:
                if not self._disk.keep(packed.card.digest, folder, load_s):
                    logger.warning("the adapter from %s is not kept on disk: others are pinned there", uri)
                self._events.reached(source, State.ON_DISK)
            except OSError as error:  # a full disk costs the next download, not this request
                logger.warning("the adapter from %s is not kept on disk: %s", uri, error)
        return LocatedAdapter(uri, packed, signer)

    def from_disk(self, digest: str, source: str) -> PackedAdapter | None:
        """The adapter with this digest, if this machine's disk has it. Local sources are never on it."""
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
        if not is_whole:  # damaged on disk: the source has it
            self._disk.remove(digest)
            return None
        self.counts.loaded("disk", self._clock() - started_s, packed.card.size_bytes, digest)
        return packed

    def _signer(self, path: Path, packed: PackedAdapter) -> str | None:
        return signer_of(path, packed.card.digest) if self._signatures else None

    def _read(self, path: Path) -> PackedAdapter:
        packed = self._validator.read(path, self._spec)
        if self._base_copies is not None:
            packed = self._base_copies.dropped_packed(packed)
        if self._texts is not None:
            packed = self._texts.of_packed(packed)
        if self._signatures and packed.card.text:
            raise AdapterUntrusted(
                "the adapter has a chat template or special tokens of its own, which no signature covers; "
                "take its tokenizer files out of the folder"
            )
        return packed


def open_adapter_reader(
    config: AdaptersConfig,
    checkpoint: Checkpoint,
    served: frozenset[str],
    counts: TierCounters,
    events: TierEvents,
    *,
    pinned: Collection[str] = (),
    uploads: Path | None = None,
) -> AdapterReader:
    """As configured: sources, the disk tier in `state_dir`, and a process that reads. Raises ConfigError.

    `events` is told how far reading has come and what leaves the disk. `pinned`: digests that the disk tier keeps.
    `uploads`: where adapters lie that came as bytes.
    """
    spec = checkpoint.spec
    root = Path(config.state_dir) / f"adapters-{spec.digest[:12]}"
    disk = DiskTier(root, config.disk_cache_bytes, config.disk_eviction, counts, events, pinned=pinned)
    try:
        sources = open_sources(config, base_name=spec.name, reserve=disk.reserve, uploads=uploads)
    except ConfigError:
        disk.close()
        raise
    validator = Validator(
        ReadLimits(max_weight_bytes=config.max_adapter_bytes, max_rank=config.max_rank),
        ReaderLimits(base_memory_bytes=config.parser_memory_bytes, base_s=config.parser_timeout_s),
        served=served,
    )
    return AdapterReader(
        sources,
        disk,
        validator,
        spec,
        counts,
        events,
        signatures=config.signing.trust.matter,
        base_copies=BaseWeightDedup(checkpoint, served),
        texts=AdapterTokenizerCache(lambda: load_tokenizer(checkpoint.tokenizer_source)),
    )
