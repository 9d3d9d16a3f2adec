"""An ingress's copy of the registry: lookups, pages and alias targets, without calls to other processes.

An alias's target is drawn by weighted rendezvous hashing (Schindelhauer & Schomaker 2005): a user gets the same target
everywhere, and when weights change only as many users move as necessary.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from functools import lru_cache
from heapq import merge
from itertools import islice
from typing import NamedTuple

from app.deployments.registry.feed.packed_entry import pack_entry, unpack_entry, unpack_ref
from app.deployments.registry.models import AliasEntry, CatalogEntry
from app.deployments.rpc.long_poll_client import TableSync
from app.deployments.rpc.long_poll_host import Changes
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import SCHEME, is_combination, parse_combination
from app.model_names import split_version

#: (tenant, name): adapters and aliases share one namespace.
Key = tuple[str, str]
Entry = CatalogEntry | AliasEntry

#: Fewer new names than this are inserted one by one; for more, the list is sorted once.
_FEW = 64
#: Entries that the constructor applies at a time.
_MANY = 5_000
#: Adapters that are remembered after their name has got other contents or was removed, the most recent: requests that
#: were resolved before need their chat templates, tokens and defaults until they have reached an engine.
MAX_REPLACED = 256
_SCHEME = SCHEME.encode()
#: `unpack_entry` for the adapters of requests, each of which needs its entry some ten times.
_unpack_recent = lru_cache(256)(unpack_entry)


class Page(NamedTuple):
    """Entries in order of name, and whether there are more."""

    entries: tuple[Entry, ...]
    has_more: bool


class RegistryView:
    """One event loop. A lookup is a dictionary access; a page costs its own length.

    Adapters are stored packed (`packed_entry`), each name once, and unpacked on access.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[
            str, dict[str, bytes | AliasEntry]
        ] = {}  # tenant -> name -> an adapter, packed, or an alias
        self._names: dict[tuple[str, type], list[str]] = {}
        self._dependents: dict[Key, set[Key]] = {}  # a part -> the combinations that have it
        self._replaced: dict[tuple[str, str, str], bytes] = {}  # tenant, name, digest -> packed, oldest first
        self._followers: list[Callable[[Key, Entry | None], None]] = []
        self._sync: TableSync[Key, Entry] = TableSync()
        coming = iter(entries)
        while some := list(islice(coming, _MANY)):
            self.apply([((entry.tenant_id, entry.name), entry) for entry in some])

    @property
    def num_adapters(self) -> int:
        return sum(len(names) for (_, kind), names in self._names.items() if kind is CatalogEntry)

    def adapter_names(self, tenant_id: str) -> Sequence[str]:
        """The names of a tenant's adapters, sorted; valid until the next turn of the event loop."""
        return self._names.get((tenant_id, CatalogEntry), ())

    def adapter_keys(self) -> list[Key]:
        """All tenants' adapters, by tenant and name."""
        return [
            (tenant_id, name)
            for tenant_id, kind in sorted(self._names, key=lambda key: key[0])
            if kind is CatalogEntry
            for name in self._names[tenant_id, kind]
        ]

    def follow(self, note: Callable[[Key, Entry | None], None]) -> None:
        """Call `note` with every present entry, and with each change from now on; None: removed."""
        self._followers.append(note)
        for tenant_id, entries in self._entries.items():
            for name in entries:
                note((tenant_id, name), self.find(name, tenant_id))

    def take(self, changes: Changes[Key, Entry]) -> None:
        """Apply a page of the published table."""
        self.apply(self._sync.changes(changes, self._keys).items())

    def apply(self, rows: Iterable[tuple[Key, Entry | None]]) -> None:
        added: dict[tuple[str, type], list[str]] = {}
        for (tenant_id, name), entry in dict(rows).items():
            stored = self._entries.setdefault(tenant_id, {})
            old = stored.get(name)
            self._note_parts((tenant_id, name), old, entry)
            if isinstance(old, bytes):
                self._note_replaced(old, tenant_id, name, entry)
            if entry is None:
                stored.pop(name, None)
            else:  # the present key stays, so that each name is one string object
                stored[name] = entry if isinstance(entry, AliasEntry) else pack_entry(entry)
            for note in self._followers:
                note((tenant_id, name), entry)
            was, becomes = _kind(old), _kind(entry)
            if was is becomes:
                continue
            if was is not None:
                names = self._names[tenant_id, was]
                del names[bisect_left(names, name)]
            if becomes is not None:
                added.setdefault((tenant_id, becomes), []).append(name)
        for key, new in added.items():
            names = self._names.setdefault(key, [])
            if len(new) < _FEW:
                for name in new:
                    insort(names, name)
            else:
                names += new
                names.sort()

    def names(self, tenant_id: str) -> KeysView[str]:
        """All names of a tenant's adapters and aliases, as a live view."""
        return self._entries.get(tenant_id, {}).keys()

    def find(self, name: str, tenant_id: str) -> Entry | None:
        stored = self._entries.get(tenant_id, {}).get(name)
        return unpack_entry(stored, tenant_id, name) if isinstance(stored, bytes) else stored

    def adapter(self, name: str, tenant_id: str) -> CatalogEntry | None:
        entry = self.find(name, tenant_id)
        return entry if isinstance(entry, CatalogEntry) else None

    def alias(self, name: str, tenant_id: str) -> AliasEntry | None:
        stored = self._entries.get(tenant_id, {}).get(name)
        return stored if isinstance(stored, AliasEntry) else None

    def resolve(self, name: str, sticky_key: str, tenant_id: str) -> AdapterRef | None:
        """The adapter that serves `name`; None for an unknown name. Equal sticky keys choose the same target of an
        alias. A target's version is left to the caller.
        """
        names = self._entries.get(tenant_id, {})
        stored = names.get(name)
        if isinstance(stored, AliasEntry):
            name, _ = split_version(choose_target(stored, sticky_key))
            stored = names.get(name)
        return unpack_ref(stored, tenant_id, name) if isinstance(stored, bytes) else None

    def aliases_to(self, tenant_id: str, name: str) -> Iterator[str]:
        """The tenant's aliases that may stand for this adapter."""
        for alias in self._names.get((tenant_id, AliasEntry), ()):
            entry = self._entries[tenant_id][alias]
            if isinstance(entry, AliasEntry) and any(split_version(target.name)[0] == name for target in entry.targets):
                yield alias

    def dependents(self, tenant_id: str, name: str) -> list[Key]:
        """The registered combinations, of any tenant, that have this adapter as a part."""
        return sorted(self._dependents.get((tenant_id, name), ()))

    def invocation(self, ref: AdapterRef) -> tuple[int, ...]:
        """The tokens that activate the adapter; see `entry_of`."""
        entry = self.entry_of(ref)
        return () if entry is None else entry.invocation_tokens

    def _note_parts(self, key: Key, old: bytes | AliasEntry | None, new: Entry | None) -> None:
        if isinstance(old, bytes) and _SCHEME in old:
            for part in _parts(unpack_ref(old, *key)):
                combinations = self._dependents[part]
                combinations.discard(key)
                if not combinations:
                    del self._dependents[part]
        for part in _parts(new.ref) if isinstance(new, CatalogEntry) else ():
            self._dependents.setdefault(part, set()).add(key)

    def _note_replaced(self, old: bytes, tenant_id: str, name: str, new: Entry | None) -> None:
        digest = unpack_ref(old, tenant_id, name).digest
        if not digest or (isinstance(new, CatalogEntry) and new.ref.digest == digest):
            return
        self._replaced.pop((tenant_id, name, digest), None)
        self._replaced[tenant_id, name, digest] = old
        if len(self._replaced) > MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]

    def _keys(self) -> Iterator[Key]:
        return ((tenant_id, name) for tenant_id, entries in self._entries.items() for name in entries)

    def entry_of(self, ref: AdapterRef) -> CatalogEntry | None:
        """The entry of a reference. Once the name means other contents it is the last one that had these; None if that
        is long ago (`MAX_REPLACED`)."""
        stored = self._entries.get(ref.tenant_id, {}).get(ref.name)
        for packed in (stored, self._replaced.get((ref.tenant_id, ref.name, ref.digest))):
            if isinstance(packed, bytes):
                entry = _unpack_recent(packed, ref.tenant_id, ref.name)
                if entry.ref.digest == ref.digest:
                    return entry
        return None

    def page(
        self,
        kinds: Sequence[type[Entry]],
        *,
        limit: int,
        after: str | None = None,
        tenant_id: str,
    ) -> Page:
        """Up to `limit` entries of these kinds with names after `after`, which need not exist."""
        parts = []
        for kind in kinds:
            names = self._names.get((tenant_id, kind), [])
            start = 0 if after is None else bisect_right(names, after)
            parts.append(names[start : start + limit + 1])
        names = list(merge(*parts))
        found = (self.find(name, tenant_id) for name in names[:limit])
        return Page(tuple(entry for entry in found if entry is not None), len(names) > limit)


def _parts(ref: AdapterRef) -> set[Key]:
    """The parts of a combination; none of any other adapter."""
    if not is_combination(ref.uri):
        return set()
    return {(part.ref.tenant_id, part.ref.name) for part in parse_combination(ref.uri).parts}


def _kind(stored: bytes | Entry | None) -> type[Entry] | None:
    """The kind of an entry, packed or not."""
    return None if stored is None else AliasEntry if isinstance(stored, AliasEntry) else CatalogEntry


def choose_target(alias: AliasEntry, sticky_key: str) -> str:
    """The target with the highest w / -ln(u), u uniform in (0, 1) from a hash of alias, target and key."""

    def score(target: str, weight: float) -> float:
        text = "\0".join((alias.tenant_id, alias.name, target, sticky_key))
        number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())
        return weight / -math.log((number + 0.5) / 2**64)

    return max(alias.targets, key=lambda target: score(target.name, target.weight)).name
