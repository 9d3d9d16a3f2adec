"""Several base models in one service: the `bases` of the settings file's `args`.

Each entry has the settings of one base model (`BASE_SECTIONS`); everything else in `args` is common to all of them.
The first one's registry has the projects, keys, limits, usage and stored files of the service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.config import AppConfig, load_config, registry_place
from app.engine.errors import ConfigError
from app.suggestions import did_you_mean

#: What may differ between base models. An entry's values are merged into those of `args`.
BASE_SECTIONS = ("model", "engine", "adapters", "placement", "semantic_router")
#: The Serve deployment of the first base model's engine replicas.
ENGINE_DEPLOYMENT = "EngineReplica"


def engine_deployment(index: int) -> str:
    """The Serve deployment of a base model's engine replicas, by its place in `bases`."""
    return ENGINE_DEPLOYMENT if index == 0 else f"{ENGINE_DEPLOYMENT}-{index + 1}"


def load_bases(values: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> tuple[AppConfig, ...]:
    """The settings of each base model, in order; without `bases` there is one. Raises ConfigError."""
    for name in ("base_uri", "base_compute"):
        if (values.get("tenants") or {}).get(name) is not None:
            raise ConfigError(f"tenants.{name} is set by bases; leave it out")
    if "bases" not in values:
        return (load_config(values, environ=environ),)
    entries, common = values["bases"], {name: value for name, value in values.items() if name != "bases"}
    if not isinstance(entries, list) or not entries or not all(isinstance(each, Mapping) for each in entries):
        raise ConfigError("bases is not a list of base models, each with its own model and adapters")
    configs: list[AppConfig] = []
    for index, entry in enumerate(entries):
        for name in entry:
            if name not in BASE_SECTIONS:
                suggestion = did_you_mean(str(name), BASE_SECTIONS)
                raise ConfigError(
                    f"bases[{index}].{name}: an entry has only {', '.join(BASE_SECTIONS)}; all base models share the "
                    f"rest, which belongs beside bases{suggestion}"
                )
        try:
            config = load_config(_merge(common, entry), environ=environ)
        except ConfigError as error:
            raise ConfigError(f"bases[{index}]: {error}") from error
        if configs:
            first = {"base_uri": configs[0].model.uri, "base_compute": configs[0].engine.arithmetic}
            tenants = config.tenants.model_copy(update=first)
            config = config.model_copy(update={"tenants": tenants})
        configs.append(config)
    if problem := next(_conflicts(configs), None):
        raise ConfigError(f"bases: {problem}")
    return tuple(configs)


def _merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` wins; mappings are merged key by key."""
    merged = {**common, **own}
    for name, value in own.items():
        if isinstance(value, Mapping) and isinstance(before := common.get(name), Mapping):
            merged[name] = _merge(before, value)
    return merged


def _conflicts(configs: list[AppConfig]) -> Iterator[str]:
    """What keeps these base models from being one service."""
    models: dict[str, int] = {}
    names: dict[str, int] = {}
    for index, config in enumerate(configs):
        if (first := models.setdefault(config.model.uri, index)) != index:
            yield f"entries {first} and {index} have the same model.uri {config.model.uri}"
        for name in (config.model.name, *(adapter.name for adapter in config.adapters.preload)):
            if (first := names.setdefault(name, index)) != index:
                yield f"entries {first} and {index} both have the name {name!r}; a name means one model"
        if registry_place(config.adapters) != registry_place(configs[0].adapters):
            yield f"entry {index} has a database of its own; state_dir and registry_url belong beside bases"
