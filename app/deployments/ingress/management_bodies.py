"""Adapters, jobs and aliases as the management routes and the Python handle show them.

In: entries of the registry. Out: plain dictionaries, the bodies of answers. Their values are of Python's own types: a
Ray job that gets one need not have this package. Nothing is asked or decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.deployments.ingress.management import ReplicaResidency
from app.deployments.registry.entries import AliasEntry, CatalogEntry, Description, RegistryJob, State


def adapter_body(entry: CatalogEntry) -> dict[str, Any]:
    """One adapter as the management routes show it."""
    return {
        "id": entry.name,
        "object": "lora",
        "state": State.LOADED.value,
        "digest": entry.ref.digest,
        "generation": entry.ref.generation,
        "path": entry.ref.uri,
        "source": entry.source,
        "max_rank": entry.max_rank,
        "size_bytes": entry.size_bytes,
        "created": int(entry.registered_s),
        "owner": entry.owner,
        "pinned": entry.pinned,
        "traffic_weight": entry.traffic_weight,
        "status": "registered",
    }


def unloaded_body(entry: CatalogEntry | None, job: RegistryJob) -> dict[str, Any]:
    """An adapter whose unload has begun, or ended; `entry` None: it was only being loaded."""
    status = "unloaded" if job.is_done else "unloading"
    body = {"id": job.name, "object": "lora"} if entry is None else adapter_body(entry)
    return body | {"state": job.state.value, "status": status, "job": job_body(job)}


def description_body(name: str, description: Description, replicas: Sequence[ReplicaResidency]) -> dict[str, Any]:
    """`state` and `reason` are the name's: those of its last job if it is not being served."""
    entry, job = description.entry, description.job
    body: dict[str, Any] = {"id": name, "object": "lora"}
    if entry is not None:
        residency = {"host": description.is_on_host, "replicas": [replica._asdict() for replica in replicas]}
        body |= adapter_body(entry) | {
            "reason": None,
            "last_error": description.last_error,
            "last_used": entry.last_used_s,
            "residency": residency,
        }
    elif job is not None:
        body |= {"state": job.state.value, "reason": job.reason, "status": "not registered"}
    return body | {"job": None if job is None else job_body(job)}


def job_body(job: RegistryJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "lora.job",
        "name": job.name,
        "kind": job.kind,
        "path": job.source,
        "state": job.state.value,
        "reason": job.reason,
        "generation": job.generation,
        "digest": job.digest,
        "requested_by": job.requested_by,
        "created": job.created_s,
        "updated": job.updated_s,
    }


def alias_body(entry: AliasEntry) -> dict[str, Any]:
    targets: Mapping[str, float] = {target.name: target.weight for target in entry.targets}
    return {
        "id": entry.name,
        "object": "alias",
        "targets": targets,
        "version": entry.version,
        "previous_version": entry.previous_version,
        "updated": entry.updated_s,
    }
