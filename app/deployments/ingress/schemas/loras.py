"""Bodies of the routes for adapters (also in vLLM's and Dynamo's formats), aliases, jobs, events and audit."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from app.config import TrafficWeight
from app.deployments.ingress.preprocess.adapter_combination import CombinationBody
from app.deployments.ingress.schemas.openai import Count, Fraction, Penalty, RepetitionPenalty, Temperature, TopK
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.schemas.response_model import Omittable, PageResponse, ResponseModel, Seconds
from app.deployments.registry.models import MAX_REGISTRATIONS

#: Every ingress holds the system prompts of all adapters.
MAX_SYSTEM_PROMPT_CHARS = 16_384


class LoraSource(Body):
    uri: str


class GenerationDefaults(Body):
    """What requests that name an adapter take where they say nothing. They win over the defaults in the adapter's own
    files. `system_prompt`: the first message of a conversation without a system message.
    """

    system_prompt: str | None = Field(default=None, min_length=1, max_length=MAX_SYSTEM_PROMPT_CHARS)
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None

    def to_json(self) -> str:
        """The JSON that the registry stores; "" for none."""
        values = self.model_dump(exclude_none=True)
        return json.dumps(values, sort_keys=True, ensure_ascii=False) if values else ""


class RegisterAdapterBody(Body):
    """`path`: the adapter's source; or `combine`: the registered adapters that it combines. Or, in Dynamo's format,
    `lora_name` and `source`: answers when the adapter is served.

    `wait`: answer when the adapter is served or has failed, instead of at once. `lazy`: register the name only;
    the first request loads the adapter.
    """

    name: str | None = None
    path: str | None = None
    lora_name: str | None = None
    source: LoraSource | None = None
    combine: CombinationBody | None = None
    wait: bool = False
    lazy: bool = False
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None
    defaults: GenerationDefaults | None = None


class ManifestEntry(Body):
    name: str
    path: str
    traffic_weight: TrafficWeight | None = None
    description: str | None = None
    defaults: GenerationDefaults | None = None


class ManifestBody(Body):
    """Adapters to register lazily: all of them, or none if one is invalid."""

    adapters: Items[ManifestEntry] = Field(min_length=1, max_length=MAX_REGISTRATIONS)


class ConfigureAdapterBody(Body):
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None
    defaults: GenerationDefaults | None = None


class LoadAdapterBody(Body):
    """vLLM's format. `load_inplace`: replace an adapter that is registered under this name.

    `lora_path`: a path, a URI or a repository of the Hugging Face Hub, `org/repo` or `org/repo@revision`.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class PinnableAdapterBody(Body):
    """SGLang's format; `lora_path` as in vLLM's."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadAdapterBody(Body):
    """`lora_int_id`, a number that vLLM gives to adapters, is ignored: the name decides."""

    lora_name: str
    lora_int_id: int | None = None


class LoadLoraBody(Body):
    """Dynamo's format. `base_model`, if given, must be the served base model.

    `lora_path`: as in vLLM's format; default: the folder of its name.
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
    """A registered adapter. `job`: the load that this response completes, if any, and `warnings` about it. `defaults`:
    as set for the name; `generation_config`: what the adapter's own files say."""

    id: str
    object: Literal["lora"]
    state: str
    generation: int
    digest: str
    path: str
    source: str
    combine: dict[str, Any] | None
    max_rank: int
    size_bytes: int
    created: Seconds
    owner: str
    pinned: bool
    traffic_weight: float
    description: str
    defaults: dict[str, Any]
    generation_config: dict[str, Any]
    metadata: dict[str, Any]
    alora_invocation_tokens: list[int] | None
    job: LoraJob | None = None
    warnings: Omittable[list[str]] = None


class LoraPage(PageResponse[Lora]):
    """`total`: all adapters that match, on any page."""

    total: int


class ReplicaResidency(ResponseModel):
    """`num_requests`: running requests that use the adapter."""

    id: str
    num_requests: int
    last_used: Seconds | None


class ResidencyResponse(ResponseModel):
    """Where an adapter is loaded: in host memory, and on which replicas' devices."""

    host: bool
    replicas: list[ReplicaResidency]


class FirstTokenTimes(ResponseModel):
    count: int
    mean: float
    p50: float
    p99: float


class ActivityResponse(ResponseModel):
    """Statistics of an adapter's requests. `loads`: by the tier that it was loaded from."""

    since: Seconds
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    time_to_first_token_seconds: FirstTokenTimes | None
    loads: Omittable[dict[str, int]] = None


class Dependent(ResponseModel):
    """A registered combination, of any project, that has the adapter as a part."""

    project_id: str
    name: str


class LoraStatus(ResponseModel):
    """The status of a name that is registered or still loading."""

    id: str
    object: Literal["lora"]
    state: str
    job: LoraJob | None
    generation: int | None = None
    digest: Omittable[str] = None
    path: Omittable[str] = None
    source: Omittable[str] = None
    combine: dict[str, Any] | None = None
    max_rank: Omittable[int] = None
    size_bytes: Omittable[int] = None
    created: Omittable[Seconds] = None
    owner: Omittable[str] = None
    pinned: Omittable[bool] = None
    traffic_weight: Omittable[float] = None
    description: Omittable[str] = None
    defaults: Omittable[dict[str, Any]] = None
    generation_config: Omittable[dict[str, Any]] = None
    metadata: Omittable[dict[str, Any]] = None
    alora_invocation_tokens: list[int] | None = None
    reason: str | None = None
    last_error: str | None = None
    last_used: Seconds | None = None
    residency: Omittable[ResidencyResponse] = None
    activity: Omittable[ActivityResponse] = None
    dependents: Omittable[list[Dependent]] = None
    warnings: Omittable[list[str]] = None


class LoraGeneration(ResponseModel):
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


class LoadedAdapters(ResponseModel):
    """SGLang's answer: the caller's adapters after the change, at most a page, with their sources."""

    success: Literal[True]
    loaded_adapters: dict[str, str]


class DynamoLora(LoraStatus):
    """Dynamo's answer to a load or unload at /v1/loras. `lora_id`: a number made from the name."""

    status: Omittable[Literal["success"]] = None
    message: Omittable[str] = None
    lora_name: Omittable[str] = None
    lora_id: Omittable[int] = None


class LoadedLora(Lora):
    """Dynamo's answer to a load."""

    lora_model: str
    status: Literal["success"]


class UnloadedLora(LoraStatus):
    """Dynamo's answer to an unload."""

    lora_model: str
    status: Literal["success"]


class EventResponse(ResponseModel):
    """An event of an adapter. For a project, ids are opaque strings."""

    id: int | str
    name: str
    event: str
    created: Seconds
    generation: int | None
    digest: str | None
    detail: str | dict[str, Any] | None
    replica_id: str | None


class AuditRecordResponse(ResponseModel):
    """A management call. For a project, ids are opaque strings."""

    id: int | str
    who: str
    action: str
    name: str
    detail: str | dict[str, Any]
    created: Seconds


class AliasBody(Body):
    """Targets and their weights: {"sql-v1": 95, "sql-v2": 5}."""

    targets: dict[str, float]


class PromoteBody(Body):
    target: str


class RollbackBody(Body):
    """Without a version or a body: the previous version."""

    may_be_empty: ClassVar[bool] = True

    version: int | None = Field(default=None, ge=1, lt=2**31)


class Alias(ResponseModel):
    id: str
    object: Literal["alias"]
    targets: dict[str, float]
    version: int
    previous_version: int | None
    updated: Seconds


class AliasVersionResponse(ResponseModel):
    id: int
    object: Literal["alias.version"]
    targets: dict[str, float]
    is_in_force: bool
