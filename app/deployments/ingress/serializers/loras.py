"""Response bodies for adapters, jobs and aliases, for the management routes and the Python handle.

They contain only built-in types, so that a Ray job without this package can receive them. Times are whole Unix seconds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from app.config import ModelConfig
from app.deployments.placement.messages import Residency
from app.deployments.registry.models import (
    AliasEntry,
    AliasVersion,
    AuditRecord,
    CatalogEntry,
    Description,
    Event,
    RegistryJob,
)
from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer
from app.engine.adapters.card import TRAINED_ON
from app.engine.adapters.combining.combination import display_source, is_combination, parse_combination
from app.model_names import base_warning


def adapter_body(entry: CatalogEntry) -> dict[str, Any]:
    """A registered adapter. `alora_invocation_tokens` is None unless it is a loaded activated LoRA."""
    return {
        "id": entry.name,
        "object": "lora",
        "state": entry.state.value,
        "digest": entry.ref.digest,
        "generation": entry.ref.generation,
        "path": display_source(entry.ref.uri),
        "source": display_source(entry.source),
        "combine": _combination_body(entry.source),
        "max_rank": entry.max_rank,
        "size_bytes": entry.size_bytes,
        "created": int(entry.registered_s),
        "owner": entry.owner,
        "pinned": entry.pinned,
        "traffic_weight": entry.traffic_weight,
        "description": entry.description,
        "defaults": json.loads(entry.defaults) if entry.defaults else {},
        "generation_config": dict(cached_adapter_tokenizer(entry.text).generation),
        "metadata": json.loads(entry.metadata) if entry.metadata else {},
        "alora_invocation_tokens": [*entry.invocation_tokens] or None,
    }


def loaded_body(entry: CatalogEntry, job: RegistryJob | None, base: ModelConfig) -> dict[str, Any]:
    """A registered adapter, the load that made it so, and warnings."""
    body = adapter_body(entry)
    return body | {"job": None if job is None else job_body(job), "warnings": load_warnings(body, base)}


def load_warnings(body: Mapping[str, Any], base: ModelConfig) -> list[str]:
    """What may be wrong with an adapter, by its body or status, on this base model."""
    warning = base_warning(body.get("metadata", {}).get(TRAINED_ON), base.name, base.uri)
    return [] if warning is None else [warning]


def _combination_body(source: str) -> dict[str, Any] | None:
    """A combination as `combine` of `POST /v1/loras` takes it, with the generation of each part; None for others."""
    if not is_combination(source):
        return None
    combination = parse_combination(source)
    method = {name: value for name, value in asdict(combination.method).items() if value is not None}
    if "majority_sign" in method:
        method["majority_sign_method"] = method.pop("majority_sign")
    parts = [{"name": f"{ref.name}@{ref.generation}", "weight": weight} for ref, weight in combination.parts]
    return {"adapters": parts, "method": method.pop("name"), **method}


def unload_body(entry: CatalogEntry | None, job: RegistryJob) -> dict[str, Any]:
    """An adapter that is being, or has been, unloaded; `entry` is None if it was still loading."""
    body = {"id": job.name, "object": "lora"} if entry is None else adapter_body(entry)
    return body | {"state": job.state.value, "job": job_body(job)}


def dynamo_fields(name: str, deed: str) -> dict[str, Any]:
    """The fields of Dynamo's answer to a load or unload, which is over."""
    message = f"LoRA adapter {name!r} {deed} successfully"
    return {"status": "success", "message": message, "lora_name": name, "lora_id": zlib.crc32(name.encode()) >> 1}


def description_body(name: str, description: Description, replicas: Sequence[Residency]) -> dict[str, Any]:
    """A name's status; if it is not being served, `state` and `reason` are those of its last job."""
    entry, job = description.entry, description.job
    body: dict[str, Any] = {"id": name, "object": "lora"}
    if entry is not None:
        on_devices = [
            {"id": each.replica_id, "num_requests": each.num_requests, "last_used": whole_seconds(each.last_used_s)}
            for each in replicas
        ]
        body |= adapter_body(entry) | {
            "reason": None,
            "last_error": description.last_error,
            "last_used": whole_seconds(entry.last_used_s),
            "residency": {"host": description.is_on_host, "replicas": on_devices},
        }
    elif job is not None:
        body |= {"state": job.state.value, "reason": job.reason}
    return body | {"job": None if job is None else job_body(job)}


def job_body(job: RegistryJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "lora.job",
        "name": job.name,
        "kind": job.kind,
        "path": display_source(job.source),
        "state": job.state.value,
        "reason": job.reason,
        "generation": job.generation,
        "digest": job.digest,
        "requested_by": job.requested_by,
        "created": int(job.created_s),
        "updated": int(job.updated_s),
    }


def alias_body(entry: AliasEntry) -> dict[str, Any]:
    targets: Mapping[str, float] = {target.name: target.weight for target in entry.targets}
    return {
        "id": entry.name,
        "object": "alias",
        "targets": targets,
        "version": entry.version,
        "previous_version": entry.previous_version,
        "updated": int(entry.updated_s),
    }


def alias_version_body(item: AliasVersion) -> dict[str, Any]:
    targets = {target.name: target.weight for target in item.targets}
    return {"id": item.version, "object": "alias.version", "targets": targets, "is_in_force": item.is_in_force}


def record_body(record: Event | AuditRecord) -> dict[str, Any]:
    """An event or an audit record; a `detail` that is JSON becomes an object."""
    body = asdict(record)
    detail = body.get("detail")
    if isinstance(detail, str) and detail.startswith("{"):
        with suppress(ValueError):  # an event's detail may be any text
            body["detail"] = json.loads(detail)
    return body | {"created": int(body.pop("time_s"))}


def whole_seconds(time_s: float | None) -> int | None:
    """Unix time as responses have it."""
    return None if time_s is None else int(time_s)
