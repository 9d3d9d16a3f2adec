"""Bodies of the routes for adapters, in the formats of this service, vLLM and Dynamo; jobs, events and audit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from app.config import TrafficWeight
from app.deployments.ingress.preprocess.adapter_combination import ComposeBody
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds
from app.deployments.registry.models import MAX_REGISTRATIONS


class RegisterAdapterBody(Body):
    """`path`: where the adapter is; or `compose`: the registered adapters that it is made of.

    `wait`: answer when the adapter is served, or with what made it fail, instead of at once. `lazy`: register only the name
    and its place; the first request for it loads the adapter.
    """

    name: str
    path: str | None = None
    compose: ComposeBody | None = None
    wait: bool = False
    lazy: bool = False
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


class ManifestEntry(Body):
    """As in `RegisterAdapterBody`."""

    name: str
    path: str
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


class ManifestBody(Body):
    """Names and places, to be known without being read: all of them, or none if one cannot be."""

    adapters: Items[ManifestEntry] = Field(min_length=1, max_length=MAX_REGISTRATIONS)


class ConfigureAdapterBody(Body):
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


class LoadAdapterBody(Body):
    """vLLM's format. `load_inplace`: a name that is registered already changes its meaning."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    lora_name: str


class LoadLoraBody(Body):
    """Dynamo's format. `base_model` may be left out; otherwise it is the served base's name.

    lora_path: a path, a URI, or `org/repo@revision` of the hub; without it the folder of the adapter's name.
    """

    lora_model: str
    lora_path: str | None = None
    base_model: str | None = None
    pin_lora: bool | None = None
    traffic_weight: TrafficWeight | None = None


class UnloadLoraBody(Body):
    lora_model: str
    base_model: str | None = None


class LoraJob(ResponseModel):
    """A load or an unload."""

    id: str
    object: Literal["lora.job"]
    name: str
    kind: Literal["load", "unload"]
    path: str
    state: str
    reason: str | None
    generation: int | None
    digest: str | None
    requested_by: str
    created: Seconds
    updated: Seconds


class Lora(ResponseModel):
    """A registered adapter. `job`: the load that ended with this answer, if one did."""

    id: str
    object: Literal["lora"]
    state: str
    generation: int
    digest: str
    path: str
    source: str
    max_rank: int
    size_bytes: int
    created: Seconds
    owner: str
    pinned: bool
    traffic_weight: float
    description: str
    metadata: dict[str, Any]
    alora_invocation_tokens: list[int] | None
    job: LoraJob | None = None


class ReplicaResidency(ResponseModel):
    """`num_requests` use the adapter now."""

    id: str
    num_requests: int
    last_used: Seconds | None


class ResidencyResponse(ResponseModel):
    """Where an adapter's contents are: in host memory, and on which replicas' devices."""

    host: bool
    replicas: list[ReplicaResidency]


class FirstTokenTimes(ResponseModel):
    count: int
    mean: float
    p50: float
    p99: float


class ActivityResponse(ResponseModel):
    """What was counted of an adapter's requests. `loads`: by the tier that it was loaded from."""

    since: Seconds
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    time_to_first_token_seconds: FirstTokenTimes | None
    loads: Omittable[dict[str, int]] = None


class LoraStatus(ResponseModel):
    """What became of a name, whether it is registered or only on its way."""

    id: str
    object: Literal["lora"]
    state: str
    job: LoraJob | None
    generation: int | None = None
    digest: Omittable[str] = None
    path: Omittable[str] = None
    source: Omittable[str] = None
    max_rank: Omittable[int] = None
    size_bytes: Omittable[int] = None
    created: Omittable[Seconds] = None
    owner: Omittable[str] = None
    pinned: Omittable[bool] = None
    traffic_weight: Omittable[float] = None
    description: Omittable[str] = None
    metadata: Omittable[dict[str, Any]] = None
    alora_invocation_tokens: list[int] | None = None
    reason: str | None = None
    last_error: str | None = None
    last_used: Seconds | None = None
    residency: Omittable[ResidencyResponse] = None
    activity: Omittable[ActivityResponse] = None


class LoraGeneration(ResponseModel):
    """What a name has meant."""

    id: int
    digest: str
    path: str
    max_rank: int
    size_bytes: int
    created: Seconds
    registered_by: str


class ManifestResult(ResponseModel):
    object: Literal["manifest"]
    num_registered: int
    num_unchanged: int


class LoadedLora(Lora):
    """Dynamo's answer to a load."""

    lora_model: str
    status: Literal["success"]


class UnloadedLora(LoraStatus):
    """Dynamo's answer to an unload."""

    lora_model: str
    status: Literal["success"]


class EventResponse(ResponseModel):
    """Something that happened to an adapter. A project knows events by ids of its own, which are strings."""

    id: int | str
    name: str
    event: str
    created: Seconds
    generation: int | None
    digest: str | None
    detail: str | dict[str, Any] | None
    replica_id: str | None


class AuditRecordResponse(ResponseModel):
    """A call that changed something. A project knows records by ids of its own, which are strings."""

    id: int | str
    who: str
    action: str
    name: str
    detail: str | dict[str, Any]
    created: Seconds
