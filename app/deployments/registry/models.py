"""What the registry says: frozen values, one kind per table; and what may be a name or a source.

These travel from the database to every process that serves requests. Times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from app.config import MAX_DESCRIPTION_CHARS, NAME_PATTERN
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import is_composition
from app.engine.errors import InvalidRequest, UnsafeSource
from app.engine.wire_format import message
from app.redaction import holds_key

DEFAULT_TENANT = "default"
#: The model's name in requests whose adapter the service is to choose.
AUTO = "auto"
MAX_SOURCE_CHARS = 4096
#: What the sources of uploaded adapters begin with; a digest follows. No client names one.
UPLOADED = "upload://"
#: Longest metadata of a card that is kept, as JSON: every ingress holds it.
MAX_METADATA_CHARS = 2000
#: Names that one call registers without reading them, in one transaction.
MAX_REGISTRATIONS = 10_000


class State(StrEnum):
    """Where an adapter's registration is. A load goes down the list to LOADED, or FAILED from anywhere.

    REGISTERED: the name and its place are known, and nothing has been read; the first request for it begins a load.
    LOADED: every ingress routes requests to it. DRAINING: no new request reaches it, running ones finish.
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
#: What is ahead of a load in each state before its last.
STATES_AHEAD: Mapping[State, Sequence[State]] = {state: _LOADING[place + 1 :] for place, state in enumerate(_LOADING)}
#: States a job does not leave.
FINAL_STATES = (State.LOADED, State.REMOVED, State.FAILED)
#: States of a name that means something.
LIVE_STATES = (State.LOADED, State.REGISTERED)


@message
@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name and what it means now. `source` is how whoever loaded it called `ref.uri`.

    What has not been read yet (REGISTERED) has no digest, and its rank and sizes are 0.
    `size_bytes` is its size in host memory, `extra_bytes` what a device holds of it beside rank rows.
    `last_used_s` is known of an entry that was asked for by name; lists and published tables do not have it.
    `text` is `AdapterCard.text`. `description`: what it is for, as whoever loaded it says, or its card.
    `invocation_tokens` and `metadata` are the `AdapterCard`'s.
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

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def tenant_id(self) -> str:
        return self.ref.tenant_id

    @property
    def is_read(self) -> bool:
        """Whether it is known what the adapter holds."""
        return bool(self.ref.digest)

    @property
    def state(self) -> State:
        return State.LOADED if self.is_read else State.REGISTERED


@message
@dataclass(frozen=True, slots=True)
class Registration:
    """A name and its place, to be known without being read. None: as it was, or as the adapter says of itself."""

    name: str
    source: str
    traffic_weight: float | None = None
    description: str | None = None


@message
@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is asked for when a name is to be loaded. `pinned` and `traffic_weight` None: as they were.

    `description` None: as the adapter says of itself.
    """

    tenant_id: str
    name: str
    source: str
    who: str
    pinned: bool | None = None
    traffic_weight: float | None = None
    description: str | None = None


@message
class RegistrationCounts(NamedTuple):
    """How many names are new or at another place now, and how many were registered just so before."""

    num_changed: int
    num_unchanged: int


class ReadAdapter(NamedTuple):
    """An adapter that was read and is in host memory: its canonical place and its facts."""

    uri: str
    card: AdapterCard


@message
@dataclass(frozen=True, slots=True)
class Generation:
    """One of the things a name has meant."""

    ref: AdapterRef
    max_rank: int
    size_bytes: int
    registered_s: float
    registered_by: str


@message
@dataclass(frozen=True, slots=True)
class AliasTarget:
    """An adapter's name and its share: weight over the sum of the alias's weights."""

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
    """What an alias stood for, or stands for now (`is_in_force`)."""

    version: int
    targets: tuple[AliasTarget, ...]
    is_in_force: bool


@message
@dataclass(frozen=True, slots=True)
class RegistryJob:
    """Work on a name. `pinned` and `traffic_weight` None: as they are.

    `generation` and `digest`, of what is loaded or unloaded, are known when a load is done; of an unload always, unless
    there was but a load to cancel. `owner` is the store that works on it, `number` its place in the order in which work
    was asked for.
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

    @property
    def is_done(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def request(self) -> LoadRequest:
        """What a load was asked for."""
        return LoadRequest(
            self.tenant_id, self.name, self.source, self.requested_by, self.pinned, self.traffic_weight,
            self.description,
        )  # fmt: skip


@message
@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to an adapter; `replica_id` saw it, if it happened on a device."""

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
    """Somebody asked for something."""

    id: str
    who: str
    action: str
    name: str
    detail: str
    time_s: float


@message
class UnloadResult(NamedTuple):
    """An unload that has begun. `is_shared`: another name means the same contents, so nothing is freed.

    `digest` None: nothing was registered yet, only loads of the name were cancelled, and the unload is over.
    """

    job: RegistryJob
    digest: str | None
    is_shared: bool


@message
class Description(NamedTuple):
    """All the registry knows of a name. `entry` is None for one that is not (or no longer) registered."""

    entry: CatalogEntry | None
    job: RegistryJob | None
    is_on_host: bool
    last_error: str | None = None  # why it could not be read for a request, if that failed the last time


def is_name(text: str) -> bool:
    """Whether an adapter or an alias may be called this."""
    return re.fullmatch(NAME_PATTERN, text) is not None and not holds_key(text)  # lists, metrics and logs have names


def check_name(name: str) -> None:
    """Raises InvalidRequest for what cannot be an adapter's or an alias's name."""
    if holds_key(name):
        raise InvalidRequest("an API key is given for a name; is it in the wrong place?", param="name")
    if not is_name(name):
        raise InvalidRequest(
            f"adapter name {name[:80]!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            param="name",
        )


def cannot_pin_error(name: str) -> InvalidRequest:
    """What to raise for a pin of contents that nobody has read: how much they take is not known."""
    return InvalidRequest(
        f"adapter {name!r} is not loaded yet and cannot be pinned; load it first: POST /v1/loras/{name}/load",
        param="pinned",
    )


def check_description(description: str | None) -> None:
    """Raises InvalidRequest for one that is too long."""
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"the description has {len(description)} characters but at most {MAX_DESCRIPTION_CHARS} are kept; "
            "say what the adapter is for in a sentence or two",
            param="description",
        )


def check_source(source: str) -> None:
    """Raises UnsafeSource for what is no place, wherever adapters may come from; InvalidRequest for half of one."""
    if is_composition(source):  # made by this service: as long as its parts are
        return
    if "\0" in source or len(source) > MAX_SOURCE_CHARS:
        raise UnsafeSource(f"{source[:80]!r} is no place: it has a NUL or over {MAX_SOURCE_CHARS} characters")
    if any("\ud800" <= each <= "\udfff" for each in source):
        raise UnsafeSource(f"{source[:80]!r} is no place: half of a character cannot be written down")
    if source.startswith("hf://") and "@" not in source:
        raise InvalidRequest(
            f"{source[:200]!r}: a revision is missing; say which one: {source[:200]}@main, or a commit", param="path"
        )
