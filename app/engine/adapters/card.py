"""Names and facts of an adapter, without its weights.

An `AdapterRef` is what travels with a request; an `AdapterCard` is what a list of adapters shows.
Identity is `digest`, the hash of the contents; names are for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.message import message


@message
@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One generation of a named adapter. `digest` is hex SHA-256 of the canonical contents."""

    name: str
    digest: str
    tenant_id: str
    generation: int = 1
    uri: str = ""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Facts about an adapter's contents.

    `max_rank` is the largest rank over its modules in decoder layers, at least 1: the number of rank
    rows it needs before rounding up. `targets` are module names ("q_proj", ...), sorted. `size_bytes` is its weights'
    size in host memory; `extra_bytes` is what it holds on a device beside its rank rows (`extra_bytes`
    in `app.engine.adapters.extras`). `text` is `AdapterText` as JSON, "" for an adapter whose prompts are the base's.
    `invocation_tokens`: the token ids from whose last occurrence in a prompt on the adapter is applied (activated LoRA,
    `app.engine.adapters.invocation`), () for one that is applied to all. `metadata` is what a card file says of the
    adapter beside its description (version, author, …): a JSON object of texts, "" for none.
    """

    digest: str
    base_digest: str
    max_rank: int
    targets: tuple[str, ...]
    dtype: str
    size_bytes: int
    description: str = ""
    extra_bytes: int = 0
    text: str = ""
    invocation_tokens: tuple[int, ...] = ()
    metadata: str = ""
