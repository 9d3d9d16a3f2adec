"""The registry's values, frozen: they travel from the database to every process that serves requests.

Also the rules for names and sources. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from app.config import MAX_DESCRIPTION_CHARS
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import is_combination
from app.engine.errors import InvalidRequest, NotFound, UnsafeSource
from app.engine.wire_format import message
from app.redaction import without_keys

DEFAULT_TENANT = "default"
#: The model name for which the semantic router chooses an adapter.
AUTO = "auto"
MAX_SOURCE_CHARS = 4096
#: The scheme of uploaded adapters' sources, followed by a digest; clients cannot use it.
UPLOADED = "upload://"
#: Longest metadata of a card that is stored, as JSON: every ingress holds it.
MAX_METADATA_CHARS = 2000
#: Names that one call registers lazily, in one transaction.
MAX_REGISTRATIONS = 10_000


class State(StrEnum):
    """Where an adapter's registration is. A load goes down the list to LOADED, or to FAILED from anywhere.

    REGISTERED: the name and source are known and nothing has been read; the first request starts a load. LOADED: every
    ingress routes requests to it. DRAINING: no new request reaches it, running ones finish.
    """

    REGISTERED = "REGISTERED"
    REQUESTED = "REQUESTED"
    DOWNLOADING = "DOWNLOADING"
    VALIDATING = "VALIDATING"
    ON_DISK = "ON_DISK"
    ON_HOST = "ON_HOST"
    LOADED = "LOADED"
    DRAINING = "DRAINING"
    REMOVED = "REMOVED"
    FAILED = "FAILED"


_LOADING = (State.REQUESTED, State.DOWNLOADING, State.VALIDATING, State.ON_DISK, State.ON_HOST)
#: The states ahead of a load in each state.
STATES_AHEAD: Mapping[State, Sequence[State]] = {state: _LOADING[place + 1 :] for place, state in enumerate(_LOADING)}
#: Final states of a job.
FINAL_STATES = (State.LOADED, State.REMOVED, State.FAILED)
#: States of a name that is in service.
LIVE_STATES = (State.LOADED, State.REGISTERED)


@message
@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A name and what it means now. `source` is as requested; `ref.uri` is its canonical form.

    An adapter that has not been read (REGISTERED) has no digest, and its rank and sizes are 0. `size_bytes` is its size
    in host memory, `extra_bytes` its device memory beside rank rows. `last_used_s` is set only by a query for one name,
    not in lists and published tables. `description` comes from the load request, or else from the card. `text`,
    `invocation_tokens`, `metadata`, `is_zero` and `has_score_head` are the `AdapterCard`'s. `defaults`: what requests
    for this name take where they say nothing, as a JSON object ("" for none); they win over the defaults of the
    adapter's own files.
    """

    ref: AdapterRef
    max_rank: int
    size_bytes: int
    registered_s: float
    owner: str
    pinned: bool = False
    traffic_weight: float = 1.0
    last_used_s: float | None = None
    source: str = ""
    extra_bytes: int = 0
    text: str = ""
    description: str = ""
    invocation_tokens: tuple[int, ...] = ()
    metadata: str = ""
    is_zero: bool = False
    defaults: str = ""
    has_score_head: bool = False

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def tenant_id(self) -> str:
        return self.ref.tenant_id

    @property
    def is_read(self) -> bool:
        """Whether the adapter has been read, so that its contents are known."""
        return bool(self.ref.digest)

    @property
    def state(self) -> State:
        return State.LOADED if self.is_read else State.REGISTERED


@message
@dataclass(frozen=True, slots=True)
class Registration:
    """A name to register lazily. None: as before, or as the adapter's card says."""

    name: str
    source: str
    traffic_weight: float | None = None
    description: str | None = None
    defaults: str | None = None


@message
@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load a name. `pinned`, `traffic_weight` and `defaults` None: as before; `description` None: from the
    adapter's card, or as before if that has none.
    """

    tenant_id: str
    name: str
    source: str
    who: str
    pinned: bool | None = None
    traffic_weight: float | None = None
    description: str | None = None
    defaults: str | None = None


@message
class RegistrationCounts(NamedTuple):
    """How many names are new or have another source now, and how many were registered like this before."""

    num_changed: int
    num_unchanged: int


class ReadAdapter(NamedTuple):
    """An adapter that was read into host memory: its canonical source and its card."""

    uri: str
    card: AdapterCard


@message
@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a name."""

    ref: AdapterRef
    max_rank: int
    size_bytes: int
    registered_s: float
    registered_by: str


@message
@dataclass(frozen=True, slots=True)
class AliasTarget:
    """An adapter's name and its weight; its share is the weight over the sum of the alias's weights."""

    name: str
    weight: float


@message
@dataclass(frozen=True, slots=True)
class AliasEntry:
    """A name that stands for one or several adapters. A rollback returns to `previous_version`."""

    name: str
    targets: tuple[AliasTarget, ...]
    version: int
    updated_s: float
    previous_version: int | None = None
    tenant_id: str = field(kw_only=True)


@message
@dataclass(frozen=True, slots=True)
class AliasVersion:
    """A version of an alias; one of them is in force."""

    version: int
    targets: tuple[AliasTarget, ...]
    is_in_force: bool


@message
@dataclass(frozen=True, slots=True)
class RegistryJob:
    """A load or an unload. `pinned`, `traffic_weight` and `defaults` None: unchanged.

    `generation` and `digest` are known when a load is done; for an unload always, unless there was only a load to
    cancel. `owner` is the store that works on it, `number` its place in the order of requests.
    """

    id: str
    name: str
    kind: Literal["load", "unload"]
    source: str
    state: State
    requested_by: str
    created_s: float
    updated_s: float
    pinned: bool | None = None
    traffic_weight: float | None = None
    reason: str | None = None
    generation: int | None = None
    digest: str | None = None
    tenant_id: str = field(kw_only=True)
    owner: str = field(default="", kw_only=True)
    number: int = field(default=0, kw_only=True)
    description: str | None = field(default=None, kw_only=True)
    defaults: str | None = field(default=None, kw_only=True)

    @property
    def request(self) -> LoadRequest:
        """The request of a load."""
        return LoadRequest(
            self.tenant_id, self.name, self.source, self.requested_by, self.pinned, self.traffic_weight,
            self.description, self.defaults,
        )  # fmt: skip


@message
@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an adapter; `replica_id` is set for events on a device."""

    id: str
    name: str
    event: str
    time_s: float
    generation: int | None = None
    digest: str | None = None
    detail: str | None = None
    replica_id: str | None = None


@message
@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A requested change."""

    id: str
    who: str
    action: str
    name: str
    detail: str
    time_s: float


@message
class UnloadResult(NamedTuple):
    """An unload that has begun. `is_shared`: another name means the same contents, so nothing is freed.

    `digest` None: only loads of the name were cancelled, and the unload is over.
    """

    job: RegistryJob
    digest: str | None
    is_shared: bool


@message
class Description(NamedTuple):
    """All the registry knows of a name. `entry` is None for one that is not, or no longer, registered."""

    entry: CatalogEntry | None
    job: RegistryJob | None
    is_on_host: bool
    last_error: str | None = None  # why the last read for a request failed, if it did


def model_id(tenant_id: str, name: str) -> str:
    """An adapter's or alias's name in prices, limits and permissions: bare if it is public, otherwise after its
    project's id and a colon, which no name contains.
    """
    return name if tenant_id == DEFAULT_TENANT else f"{tenant_id}:{name}"


def not_found_error(what: str, id_: str, way_out: str = "") -> NotFound:
    """Without the key that a client may have sent as an id: Ray stores and shows what an actor raises."""
    return NotFound(f"there is no {what} {without_keys(id_)[:80]!r}{way_out}")


def cannot_pin_error(name: str) -> InvalidRequest:
    """An adapter whose size is unknown cannot be pinned."""
    return InvalidRequest(
        f"adapter {name!r} is not loaded yet and cannot be pinned; load it first: POST /v1/loras/{name}/load",
        param="pinned",
    )


def check_description(description: str | None) -> None:
    """Raises InvalidRequest for a description that is too long."""
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"the description has {len(description)} characters but at most {MAX_DESCRIPTION_CHARS} are allowed; "
            "say what the adapter is for in a sentence or two",
            param="description",
        )


def lacks_oci_version(source: str) -> bool:
    """Whether this is an address in an OCI registry without a tag or digest."""
    return source.startswith("oci://") and not {":", "@"} & set(source.rpartition("/")[2])


def check_source(source: str) -> None:
    """Raises UnsafeSource for a malformed source, wherever adapters may come from; InvalidRequest for a missing
    revision.
    """
    if is_combination(source):  # made by this service, so its length is that of its parts
        return
    if "\0" in source or len(source) > MAX_SOURCE_CHARS:
        raise UnsafeSource(f"{source[:80]!r} is not a source: it has a NUL or over {MAX_SOURCE_CHARS} characters")
    if any("\ud800" <= each <= "\udfff" for each in source):
        raise UnsafeSource(f"{source[:80]!r} is not a source: it has half of a character (a lone surrogate)")
    if source.startswith("hf://") and "@" not in source:
        raise InvalidRequest(
            f"{source[:200]!r}: a revision is missing; give one: {source[:200]}@main, or a commit", param="path"
        )
    if lacks_oci_version(source):
        raise InvalidRequest(
            f"{source[:200]!r}: a tag is missing; give one: {source[:200]}:latest, or a digest, @sha256:...",
            param="path",
        )
