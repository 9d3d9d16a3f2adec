"""An ingress' copy of the registry: lookups, pages and the choice of an alias's target, without asking anybody.

In: changes, as the owner publishes them. Out: entries by name, names in order, the adapter that a request
goes to. An alias's target is drawn by weighted rendezvous hashing (Schindelhauer & Schomaker 2005): the
same user gets the same target everywhere, and when weights change only as many users move as must.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from heapq import merge
from typing import NamedTuple

from app.deployments.links.published import Changes
from app.deployments.registry.entries import AliasEntry, CatalogEntry
from app.engine.adapters.card import AdapterRef

#: (tenant, name): adapters and aliases share one namespace.
Key = tuple[str, str]
Entry = CatalogEntry | AliasEntry

#: With fewer new names than this, each is inserted in order; with more, the names are sorted once.
_FEW = 64


class Page(NamedTuple):
    """Entries in order of name, and whether there are more behind them."""

    entries: tuple[Entry, ...]
    has_more: bool


class RegistryView:
    """One event loop. A lookup is a dictionary's; a page costs its own length."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[Key, Entry] = {}
        self._names: dict[tuple[str, type], list[str]] = {}
        self._unconfirmed: set[Key] | None = None  # of a copy that is coming: what it has not mentioned so far
        self.apply([((entry.tenant_id, entry.name), entry) for entry in entries])

    @property
    def num_adapters(self) -> int:
        return sum(len(names) for (_, kind), names in self._names.items() if kind is CatalogEntry)

    def take(self, news: Changes[Key, Entry]) -> None:
        """Take over a page. Of a new copy what is no more goes with the last page: until then it may be yet to come."""
        if news.is_first:
            self._unconfirmed = set(self._entries)
        self.apply(news.rows)
        if self._unconfirmed is not None:
            self._unconfirmed.difference_update(key for key, _ in news.rows)
            if news.is_last:
                self.apply([(key, None) for key in self._unconfirmed])
                self._unconfirmed = None

    def apply(self, rows: Sequence[tuple[Key, Entry | None]]) -> None:
        """Take over changes."""
        added: dict[tuple[str, type], list[str]] = {}
        for key, entry in dict(rows).items():
            tenant_id, name = key
            old = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
            if type(old) is type(entry):
                continue
            if old is not None:
                names = self._names[tenant_id, type(old)]
                del names[bisect_left(names, name)]
            if entry is not None:
                added.setdefault((tenant_id, type(entry)), []).append(name)
        for place, new in added.items():
            names = self._names.setdefault(place, [])
            if len(new) < _FEW:
                for name in new:
                    insort(names, name)
            else:
                names += new
                names.sort()

    def find(self, name: str, tenant_id: str) -> Entry | None:
        return self._entries.get((tenant_id, name))

    def adapter(self, name: str, tenant_id: str) -> CatalogEntry | None:
        entry = self.find(name, tenant_id)
        return entry if isinstance(entry, CatalogEntry) else None

    def means_base(self, name: str, base_name: str, sticky_key: str, tenant_id: str) -> bool:
        """Whether a request for `name` goes to the base: an alias may stand for it, beside adapters."""
        entry = self.find(name, tenant_id)
        return isinstance(entry, AliasEntry) and choose_target(entry, sticky_key) == base_name

    def resolve(self, name: str, sticky_key: str, tenant_id: str) -> AdapterRef | None:
        """The adapter a request for `name` goes to; equal keys choose equally. None: there is no such name."""
        entry = self.find(name, tenant_id)
        if isinstance(entry, AliasEntry):
            entry = self.adapter(choose_target(entry, sticky_key), tenant_id)
        return None if entry is None else entry.ref

    def text(self, ref: AdapterRef) -> str:
        """What of the adapter's text is its own; nothing once its name means other contents."""
        entry = self.adapter(ref.name, ref.tenant_id)
        return entry.text if entry is not None and entry.ref.digest == ref.digest else ""

    def page(
        self,
        kinds: Sequence[type[Entry]],
        *,
        limit: int,
        after: str | None = None,
        tenant_id: str,
    ) -> Page:
        """Up to `limit` entries of these kinds whose names come after `after`, which need not exist."""
        parts = []
        for kind in kinds:
            names = self._names.get((tenant_id, kind), [])
            start = 0 if after is None else bisect_right(names, after)
            parts.append(names[start : start + limit + 1])
        names = list(merge(*parts))
        return Page(tuple(self._entries[tenant_id, name] for name in names[:limit]), len(names) > limit)


def choose_target(alias: AliasEntry, sticky_key: str) -> str:
    """The target with the highest w / -ln(u), u uniform in (0, 1) from a hash of alias, target and key."""

    def score(target: str, weight: float) -> float:
        text = "\0".join((alias.tenant_id, alias.name, target, sticky_key))
        number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())
        return weight / -math.log((number + 0.5) / 2**64)

    return max(alias.targets, key=lambda target: score(target.name, target.weight)).name
