"""Validation of Serve's own part of the settings file, before Serve starts.

A key that Serve would silently ignore is an error here, with a suggestion. The `args` of our application are checked by
`app.config`. Ray is imported here, so its environment (`ray_env`) must be set before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from app.base_models import engine_deployment
from app.cli.config_file import IMPORT_PATH
from app.deployments.placement.autoscaling import AdapterDemand, Objective
from app.engine.errors import ConfigError
from app.suggestions import did_you_mean, model_in

#: Serve's own policy counts open calls, of which each ingress keeps one per engine replica.
_ENGINE_POLICY = f"{AdapterDemand.__module__}:{AdapterDemand.__name__}"
#: Fields that Serve's schema accepts as any mapping and validates as one of these later.
_READ_LATER: Mapping[str, type[BaseModel]] = {
    "autoscaling_config": AutoscalingConfig,
    "request_router_config": RequestRouterConfig,
}


def serve_schema(document: Mapping[str, Any], path: Path) -> ServeDeploySchema:
    """The validated schema. Raises ConfigError naming each unknown key, or each value that Serve rejects."""
    wrong = [*_unknown_keys(document, ServeDeploySchema, ""), *_wrong_deployments(document)]
    if wrong:
        raise ConfigError(f"{path}: " + "; ".join(wrong))
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(lines)) from error


def _unknown_keys(value: Any, model: type[BaseModel], where: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name", index) if isinstance(item, Mapping) else index
            yield from _unknown_keys(item, model, f"{where}[{name}]")
    if not isinstance(value, Mapping):
        return
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inner_value in value.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in known:
            yield f"{place} is an unknown key{did_you_mean(str(key), known)}"
        elif inner := _READ_LATER.get(key) or model_in(known[key]):
            yield from _unknown_keys(inner_value, inner, place)


def _wrong_deployments(document: Mapping[str, Any]) -> Iterator[str]:
    for application in document.get("applications") or ():
        if not isinstance(application, Mapping) or application.get("import_path") != IMPORT_PATH:
            continue
        bases = (application.get("args") or {}).get("bases")
        engines = [engine_deployment(index) for index in range(len(bases) if isinstance(bases, list) else 1)]
        for deployment in application.get("deployments") or ():
            name = deployment.get("name") if isinstance(deployment, Mapping) else deployment
            if name != "Ingress" and name not in engines:
                yield f"deployments: there is no {name!r}, only {', '.join(engines)} and Ingress"
            elif name in engines and _counts_calls(deployment):
                yield (
                    f"deployments: {name} is scaled by Serve's own policy, which counts open calls and not work; "
                    f"add policy: {{policy_function: '{_ENGINE_POLICY}'}} to its autoscaling_config"
                )
            elif name in engines and _may_sleep(deployment) and not _is_ready_asleep(application):
                yield (
                    f"deployments: {name} may have no replicas (min_replicas: 0), and the service would not be "
                    "ready then; set http.ready_at_zero_replicas: true in args, or a min_replicas of at least 1"
                )
            else:
                yield from _unknown_policy_options(deployment)


def _unknown_policy_options(deployment: Mapping[str, Any]) -> Iterator[str]:
    scaling = deployment.get("autoscaling_config")
    policy = scaling.get("policy") if isinstance(scaling, Mapping) else None
    if not isinstance(policy, Mapping) or policy.get("policy_function") != _ENGINE_POLICY:
        return
    known = [field.name for field in fields(Objective)]
    for name in policy.get("policy_kwargs") or ():
        if name not in known:
            yield f"policy_kwargs.{name} is an unknown key{did_you_mean(name, known)}"


def _may_sleep(deployment: Mapping[str, Any]) -> bool:
    scaling = deployment.get("autoscaling_config")
    return isinstance(scaling, Mapping) and scaling.get("min_replicas") == 0


def _is_ready_asleep(application: Mapping[str, Any]) -> bool:
    http = (application.get("args") or {}).get("http") or {}
    return isinstance(http, Mapping) and http.get("ready_at_zero_replicas") is True


def _counts_calls(deployment: Mapping[str, Any]) -> bool:
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return deployment.get("num_replicas") == "auto"
    return isinstance(scaling, Mapping) and "policy" not in scaling
