"""A registered adapter packed into one `bytes` object, so that an ingress can hold a million of them.

The name and tenant are not packed: the holder has them as its key. Packing and unpacking lose nothing, whatever the
texts contain. Packed entries never leave the process, so the layout may change with any version.
"""

from __future__ import annotations

from struct import Struct

from app.deployments.registry.models import CatalogEntry
from app.engine.adapters.card import AdapterRef

#: Flags, generation, rank, size, extra bytes, weight, registered, last used; lengths: digest, URI, source, owner, text,
#: invocation tokens, metadata, defaults.
_HEAD = Struct("<BqqqqdddHIIIIIHI")
_PINNED, _USED, _SAME_SOURCE, _HEX_DIGEST, _ZERO, _SCORE_HEAD = 1, 2, 4, 8, 16, 32
#: Texts that are not valid UTF-8 survive packing too.
_ERRORS = "surrogatepass"


def pack_entry(entry: CatalogEntry) -> bytes:
    """Everything but the name and the tenant."""
    ref = entry.ref
    digest, is_hex = _pack_digest(ref.digest)
    is_same = entry.source == ref.uri
    uri, owner = ref.uri.encode(errors=_ERRORS), entry.owner.encode(errors=_ERRORS)
    source = b"" if is_same else entry.source.encode(errors=_ERRORS)
    text, metadata = entry.text.encode(errors=_ERRORS), entry.metadata.encode(errors=_ERRORS)
    defaults = entry.defaults.encode(errors=_ERRORS)
    flags = (
        _PINNED * entry.pinned | _USED * (entry.last_used_s is not None) | _SAME_SOURCE * is_same
        | _HEX_DIGEST * is_hex | _ZERO * entry.is_zero | _SCORE_HEAD * entry.has_score_head
    )  # fmt: skip
    header = _HEAD.pack(
        flags, ref.generation, entry.max_rank, entry.size_bytes, entry.extra_bytes, entry.traffic_weight,
        entry.registered_s, entry.last_used_s or 0.0, len(digest), len(uri), len(source), len(owner), len(text),
        len(entry.invocation_tokens), len(metadata), len(defaults),
    )  # fmt: skip
    invocation = Struct(f"<{len(entry.invocation_tokens)}Q").pack(*entry.invocation_tokens)
    description = entry.description.encode(errors=_ERRORS)
    return b"".join((header, digest, uri, source, owner, text, invocation, metadata, defaults, description))


def unpack_ref(packed: bytes, tenant_id: str, name: str) -> AdapterRef:
    flags, generation, _, _, _, _, _, _, num_digest, num_uri, *_ = _HEAD.unpack_from(packed)
    end = _HEAD.size + num_digest
    digest = _unpack_digest(packed[_HEAD.size : end], flags)
    return AdapterRef(name, digest, tenant_id, generation, packed[end : end + num_uri].decode(errors=_ERRORS))


def unpack_entry(packed: bytes, tenant_id: str, name: str) -> CatalogEntry:
    (
        flags, _, max_rank, size_bytes, extra_bytes, weight, registered_s, used_s, num_digest, num_uri, num_source,
        num_owner, num_text, num_invocation, num_metadata, num_defaults,
    ) = _HEAD.unpack_from(packed)  # fmt: skip
    ref = unpack_ref(packed, tenant_id, name)
    source_at = _HEAD.size + num_digest + num_uri
    owner_at = source_at + num_source
    text_at = owner_at + num_owner
    invocation_at = text_at + num_text
    invocation = Struct(f"<{num_invocation}Q")
    metadata_at = invocation_at + invocation.size
    defaults_at = metadata_at + num_metadata
    description_at = defaults_at + num_defaults
    return CatalogEntry(
        ref=ref,
        max_rank=max_rank,
        size_bytes=size_bytes,
        registered_s=registered_s,
        owner=packed[owner_at:text_at].decode(errors=_ERRORS),
        pinned=bool(flags & _PINNED),
        traffic_weight=weight,
        last_used_s=used_s if flags & _USED else None,
        source=ref.uri if flags & _SAME_SOURCE else packed[source_at:owner_at].decode(errors=_ERRORS),
        extra_bytes=extra_bytes,
        text=packed[text_at:invocation_at].decode(errors=_ERRORS),
        description=packed[description_at:].decode(errors=_ERRORS),
        invocation_tokens=invocation.unpack_from(packed, invocation_at),
        metadata=packed[metadata_at:defaults_at].decode(errors=_ERRORS),
        defaults=packed[defaults_at:description_at].decode(errors=_ERRORS),
        is_zero=bool(flags & _ZERO),
        has_score_head=bool(flags & _SCORE_HEAD),
    )


def _pack_digest(digest: str) -> tuple[bytes, bool]:
    """The digest in half its length if it is 64 lower-case hex digits; and whether it is."""
    if len(digest) == 64:
        try:
            packed = bytes.fromhex(digest)
        except ValueError:
            pass
        else:
            if packed.hex() == digest:
                return packed, True
    return digest.encode(errors=_ERRORS), False


def _unpack_digest(packed: bytes, flags: int) -> str:
    return packed.hex() if flags & _HEX_DIGEST else packed.decode(errors=_ERRORS)
