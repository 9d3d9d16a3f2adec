"""Index of the embedded descriptions of adapters, with nearest-neighbour search by cosine.

An adapter without a description is not a candidate, nor is one with a score head: it generates no text. One whose
description is not embedded yet is waited for, not skipped. Whether its weights are loaded makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.deployments.ingress.semantic_router.decision import ScoredAdapter
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import CatalogEntry

Floats = NDArray[np.float32]
#: Texts to unit vectors, [N, H].
Embed = Callable[[Sequence[str]], Awaitable[Floats]]
#: The names that a caller may see, by owner; None: all of the owner's.
Visible = Mapping[str, frozenset[str] | None]

#: Descriptions per embedding call.
MAX_TOGETHER = 16
#: Sentences of a description that are compared one by one.
MAX_SENTENCES = 24
#: Texts of which the whole description's vector is the mean.
_NUM_WHOLE = 3
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
#: The best candidates of an owner that are tried before all of its candidates are sorted.
_FIRST = 64


class _Sentences(NamedTuple):
    """The sentences of candidates: those from `starts[i]` on belong to the candidate in row `rows[i]`."""

    vectors: Floats
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]


class _OwnerCandidates:
    """One owner's candidates: row i of `vectors` belongs to `names[i]`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: dict[str, int] = {}
        self.texts: dict[str, str] = {}  # embedded texts
        self.pending: dict[str, str] = {}  # texts to embed
        self._vectors: Floats = np.zeros((0, 0), np.float32)
        self._sentences: dict[str, Floats] = {}
        self._stacked: _Sentences | None = None  # of all names, made when it is needed

    @property
    def vectors(self) -> Floats:
        return self._vectors[: len(self.names)]

    def put(self, name: str, text: str, vector: Floats, sentences: Floats | None = None) -> None:
        """`vector`: [H], the whole description; `sentences`: [N, H], None or empty if it has only one."""
        row = self.rows.get(name)
        if row is None:
            row = len(self.names)
            if row >= len(self._vectors):
                grown = np.zeros((max(64, 2 * row), len(vector)), np.float32)
                if row:
                    grown[:row] = self._vectors[:row]
                self._vectors = grown
            self.names.append(name)
            self.rows[name] = row
        self._vectors[row], self.texts[name] = vector, text
        self._sentences.pop(name, None)
        if sentences is not None and len(sentences):
            self._sentences[name] = sentences
        self._stacked = None

    def scores(self, vector: Floats, names: Sequence[str] | None) -> Floats:
        """The scores [N] of a prompt's vector [H] with these candidates; None: with all, as in `self.names`."""
        if names is None:
            if self._stacked is None:
                self._stacked = self._stack(self.names)
            return _scores(vector, self.vectors, self._stacked)
        return _scores(vector, self._vectors[[self.rows[name] for name in names]], self._stack(names))

    def _stack(self, names: Sequence[str]) -> _Sentences:
        several = {row: self._sentences[name] for row, name in enumerate(names) if name in self._sentences}
        lengths = [*map(len, several.values())]
        vectors = np.concatenate([*several.values()]) if several else np.zeros((0, 0), np.float32)
        return _Sentences(vectors, np.cumsum([0, *lengths])[:-1], np.array([*several], np.int64))

    def pending_of(self, names: Collection[str] | None) -> list[str]:
        """Up to `MAX_TOGETHER` of these names (None: of all) that are not embedded yet."""
        if names is None:
            return [*islice(self.pending, MAX_TOGETHER)]
        return [*islice((name for name in names if name in self.pending), MAX_TOGETHER)]

    def remove(self, name: str) -> None:
        """Remove a candidate; the last row moves into its place."""
        self.pending.pop(name, None)
        row = self.rows.pop(name, None)
        if row is None:
            return
        del self.texts[name]
        self._sentences.pop(name, None)
        self._stacked = None
        last = self.names.pop()
        if last != name:
            self.names[row], self.rows[last] = last, row
            self._vectors[row] = self._vectors[len(self.names)]


class Candidates:
    """All candidates; one per ingress, on its event loop."""

    def __init__(self) -> None:
        self._owners: dict[str, _OwnerCandidates] = {}

    def note(self, key: Key, entry: Entry | None) -> None:
        """Apply a registry change; `entry` is None if it was removed."""
        owner_id, name = key
        owned = self._owners.setdefault(owner_id, _OwnerCandidates())
        text = entry.description if isinstance(entry, CatalogEntry) and not entry.has_score_head else ""
        if not text:
            owned.remove(name)
        elif owned.texts.get(name) == text:
            owned.pending.pop(name, None)
        else:
            owned.pending[name] = text

    def count(self, owner_id: str) -> int:
        """The number of an owner's candidates, embedded or not."""
        owned = self._of(owner_id)
        return len(owned.rows) + sum(name not in owned.rows for name in owned.pending)

    def subset(self, owner_id: str, names: Set[str]) -> set[str]:
        """The names that are candidates of an owner, embedded or not; costs the smaller of the two sets."""
        owned = self._of(owner_id)
        return (owned.rows.keys() & names) | (owned.pending.keys() & names)

    def is_pending(self, owner_id: str, names: Collection[str] | None) -> bool:
        """Whether any of these is not embedded yet."""
        return bool(self._of(owner_id).pending_of(names))

    async def embed_pending(
        self, owner_id: str, names: Collection[str] | None, embed: Embed, max_together: int = MAX_TOGETHER
    ) -> None:
        """Embed an owner's pending descriptions of these names, including changes that arrive meanwhile."""
        owned = self._of(owner_id)
        while items := [(name, owned.pending[name]) for name in owned.pending_of(names)[:max_together]]:
            texts = [_texts(name, text) for name, text in items]
            vectors = await embed([*chain.from_iterable(texts)])
            ends = np.cumsum([*map(len, texts)])[:-1]
            for (name, text), of_text in zip(items, np.split(vectors, ends), strict=True):
                whole = of_text[:_NUM_WHOLE].mean(axis=0)
                whole /= max(float(np.linalg.norm(whole)), 1e-12)
                if owned.pending.get(name) == text:  # otherwise it has changed again or was removed
                    del owned.pending[name]
                    owned.put(name, text, whole, of_text[_NUM_WHOLE:])

    def nearest(
        self,
        vector: Floats,
        visible: Visible,
        is_accessible: Callable[[str, str], bool],
        threshold: float,
        top_k: int,
    ) -> list[ScoredAdapter]:
        """At most `top_k` candidates by descending score, all of at least `threshold`.

        vector: [H], unit length. is_accessible: whether the name resolves to this owner's adapter for the caller.
        """
        found: list[ScoredAdapter] = []
        for owner_id, names in visible.items():
            owned = self._of(owner_id)
            listed = None if names is None else [name for name in sorted(names) if name in owned.rows]
            candidates = owned.names if listed is None else listed
            if not candidates:
                continue
            scores = owned.scores(vector, listed)
            num_found = 0
            for row in _descending(scores, threshold):
                name = candidates[row]
                if num_found == top_k:
                    break
                if is_accessible(owner_id, name):
                    num_found += 1
                    found.append(ScoredAdapter(name, owner_id, float(scores[row])))
        return sorted(found, key=lambda one: (-one.score, one.name))[:top_k]

    def _of(self, owner_id: str) -> _OwnerCandidates:
        return self._owners.get(owner_id) or _OwnerCandidates()


def _scores(vector: Floats, whole: Floats, sentences: _Sentences) -> Floats:
    """A prompt's cosine with each whole description [N, H], or the mean of its two highest where it has sentences."""
    scores: Floats = whole @ vector
    if len(sentences.rows):
        cosines = sentences.vectors @ vector
        highest = np.maximum.reduceat(cosines, sentences.starts)
        cosines[cosines == np.repeat(highest, np.diff(sentences.starts, append=len(cosines)))] = -1.0
        second = np.maximum.reduceat(cosines, sentences.starts)
        of_whole = scores[sentences.rows]
        scores[sentences.rows] = (np.maximum(of_whole, highest) + np.maximum(np.minimum(of_whole, highest), second)) / 2
    return scores


def _texts(name: str, description: str) -> list[str]:
    """What is embedded of a candidate: `_NUM_WHOLE` texts of the whole, then its sentences if it has several."""
    words = re.sub(r"[-_/:]+", " ", name)
    sentences = [*dict.fromkeys(filter(None, _SENTENCE_END.split(description.strip())))]
    return [words, description, f"{words}: {description}", *(sentences[:MAX_SENTENCES] if len(sentences) > 1 else [])]


def _descending(scores: Floats, threshold: float) -> Iterator[int]:
    """Rows of at least the threshold, best first; the first `_FIRST` are found without sorting all."""
    count = min(_FIRST, len(scores))
    best = np.argpartition(-scores, count - 1)[:count]
    best = best[np.argsort(-scores[best], kind="stable")]
    yield from (int(row) for row in best if scores[row] >= threshold)
    if count < len(scores) and scores[best[-1]] >= threshold:
        seen = set(best.tolist())
        yield from (
            int(row) for row in np.argsort(-scores, kind="stable") if int(row) not in seen and scores[row] >= threshold
        )
