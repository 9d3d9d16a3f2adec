"""Responses of the root, the version, the probes and /v1/status."""

from __future__ import annotations

from typing import Any, Literal

from app.deployments.ingress.schemas.loras import EventResponse
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds


class RootLinks(ResponseModel):
    openapi: str
    models: str
    health: str


class ServiceInfo(ResponseModel):
    name: Literal["polylora"]
    version: str
    model: str
    links: RootLinks


class Release(ResponseModel):
    version: str


class Liveness(ResponseModel):
    status: Literal["alive"]


class Health(ResponseModel):
    """`asleep`: there are zero replicas, and a request starts one."""

    status: Literal["ok", "asleep"]


class SessionResponse(ResponseModel):
    """The caller. `kind`: open, without a key; project, admin or operator (the management token). `role`: of a
    project's key. `expires`: when the session of a cookie that was just set ends."""

    object: Literal["session"]
    kind: Literal["open", "project", "operator", "admin"]
    key_id: str | None
    role: str | None
    project_id: str | None
    project_name: str | None
    model: str
    has_projects: bool
    expires: Seconds | None


class Samples(ResponseModel):
    """Columns of equal length. `times`: when each sample of `interval_s` begins; one without any request may be absent.
    Times to first token are seconds. Open and queued requests and replicas are as the sample began, null if unknown; a
    project does not get them."""

    times: list[Seconds]
    requests: list[int]
    errors: list[int]
    refused: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    completion_tokens: list[int]
    time_to_first_token_p50: list[float | None]
    time_to_first_token_p99: list[float | None]
    open: Omittable[list[int | None]] = None
    queued: Omittable[list[int | None]] = None
    replicas: Omittable[list[int | None]] = None


class ScalingDecisionResponse(ResponseModel):
    """A change of a deployment's number of replicas that the autoscaling policy wanted. `reason`: the signal that needs
    the most replicas; `needed_replicas`: how many. Ray Serve acts after the delays of `autoscaling_config`."""

    deployment: str
    created: Seconds
    prev_num_replicas: int
    target_num_replicas: int
    reason: str
    needed_replicas: float


class DrainedReplica(ResponseModel):
    id: str
    object: Literal["replica"]
    state: Literal["draining"]


class OverviewReplica(ResponseModel):
    """A replica as placement and this ingress know it. `stats`: its own counts; null while it drains
    or does not answer."""

    id: str
    state: Literal["running", "unreachable", "draining"]
    started: Seconds
    num_requests: int
    num_rank_rows: int
    num_assigned: int
    stats: dict[str, Any] | None


class Overview(ResponseModel):
    """A project gets the fields that are required. `changes` counts changes of the caller's adapters and aliases.
    `scaling_decisions`: newest first; null while placement is down."""

    object: Literal["overview"]
    time: Seconds
    since: Seconds
    interval_s: int
    version: str
    model: str
    is_ready: bool
    changes: int
    num_adapters: int
    samples: Samples
    events: list[EventResponse]
    num_open_requests: Omittable[int] = None
    replicas: Omittable[list[OverviewReplica]] = None
    scaling_decisions: list[ScalingDecisionResponse] | None = None
    tiers: Omittable[dict[str, Any]] = None
    policy: Omittable[str] = None


class ResidencyReplica(ResponseModel):
    id: str
    started: Seconds
    num_requests: int
    num_rank_rows: int
    num_assigned: int


class ResidencyAdapters(ResponseModel):
    """Columns of equal length. `tenant`: an index of `tenants`. `rows`: rank rows on a device, 0 until one has held the
    adapter. `host`: in host memory. `resident` and `assigned`: indexes of `replicas`."""

    name: list[str]
    tenant: list[int]
    digest: list[str]
    max_rank: list[int]
    rows: list[int]
    size_bytes: list[int]
    pinned: list[bool]
    host: list[bool]
    resident: list[list[int]]
    assigned: list[list[int]]


class ResidencyMap(ResponseModel):
    """`preference`: the order in which the policy prefers replicas for the one adapter that was named."""

    object: Literal["residency"]
    time: Seconds
    policy: str
    replicas: list[ResidencyReplica]
    tenants: list[str]
    adapters: ResidencyAdapters
    preference: Omittable[list[int]] = None


class SettingResponse(ResponseModel):
    """A setting; `id` is its dotted name in the configuration, `is_set` whether it differs from its default."""

    id: str
    value: Any
    default: Any
    is_set: bool
    description: str


class ServiceStatus(ResponseModel):
    """A project gets only the required fields. `replicas`: statistics of replicas; `tiers`: of the store;
    `scaling_decisions`: newest first, null while placement is down."""

    object: Literal["status"]
    version: str
    model: str
    is_ready: bool
    num_adapters: Omittable[int] = None
    num_open_requests: Omittable[int] = None
    replicas: Omittable[list[dict[str, Any]]] = None
    scaling_decisions: list[ScalingDecisionResponse] | None = None
    tiers: Omittable[dict[str, Any]] = None
    failures: Omittable[list[EventResponse]] = None
