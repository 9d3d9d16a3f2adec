"""`polylora apply`: make a running service's adapters and aliases match a file.

Prints the difference and applies it. Applying twice changes nothing. Names that the file does not mention stay unless
`--prune` is given; a file without adapters removes none. Adapters are created before the aliases that point to them,
and removed after them. A failed change does not stop the others; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.cli.api_client import DEFAULT_URL, ApiClient, ApiError
from app.cli.config_file import yaml_problem
from app.config import TrafficWeight
from app.engine.errors import ConfigError
from app.model_names import Name, NameReference

DEFAULT_FILE = "configs/adapters.yaml"


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DesiredAdapter(_FileModel):
    """An adapter as in `POST /v1/loras`."""

    name: Name
    path: str
    pinned: bool = False
    traffic_weight: TrafficWeight = 1.0


class DesiredAlias(_FileModel):
    name: Name
    targets: dict[NameReference, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)


class DesiredState(_FileModel):
    """The whole file."""

    adapters: tuple[DesiredAdapter, ...] = ()
    aliases: tuple[DesiredAlias, ...] = ()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [adapter.name for adapter in self.adapters] + [alias.name for alias in self.aliases]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name!r} is used twice; adapters and aliases share one namespace")
        return self


class PlannedChange(NamedTuple):
    """One line of the difference and its request; `request` None: no change."""

    sign: str
    name: str
    text: str
    request: tuple[str, str, Mapping[str, Any] | None] | None


def add_apply(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("apply", help="make a running service's adapters match a file")
    parser.add_argument("file", type=Path, nargs="?", default=Path(DEFAULT_FILE), help=f"default: {DEFAULT_FILE}")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the service; default: {DEFAULT_URL}")
    parser.add_argument("--prune", action="store_true", help="remove what the file does not mention")
    parser.add_argument(
        "--reload", action="store_true", help="load every adapter again, because its files may have changed"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the difference and change nothing")
    parser.set_defaults(run=_apply)


def _apply(arguments: argparse.Namespace) -> int:
    desired = read_desired_state(arguments.file)
    service = ApiClient(arguments.url)
    adapters = {item["id"]: item for item in service.everything("/v1/loras")}
    aliases = {item["id"]: item for item in service.everything("/v1/aliases")}
    changes = difference(desired, adapters, aliases, prune=arguments.prune, reload=arguments.reload)
    return apply_changes(changes, service.call, dry_run=arguments.dry_run)


def read_desired_state(path: Path) -> DesiredState:
    """The parsed file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return DesiredState.model_validate({} if content is None else content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(lines)) from error


def difference(
    desired: DesiredState,
    adapters: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, Mapping[str, Any]],
    *,
    prune: bool,
    reload: bool,
) -> list[PlannedChange]:
    """The changes in the order in which they can be made: a name is free before it means the other kind.

    Raises ConfigError if pruning would remove every adapter and the file does not say that there are to be none.
    """
    if prune and adapters and "adapters" not in desired.model_fields_set:
        raise ConfigError(
            f"the file does not mention adapters, and --prune would remove all {len(adapters)} of the service; "
            "write 'adapters: []' if there are to be none"
        )
    names, alias_names = ({entry.name for entry in entries} for entries in (desired.adapters, desired.aliases))
    loads = [_adapter_change(entry, adapters.get(entry.name), reload=reload) for entry in desired.adapters]
    puts = [_alias_change(entry, aliases.get(entry.name)) for entry in desired.aliases]
    unalias = [_removal("alias", "/v1/aliases", name, prune=prune) for name in sorted(set(aliases) - alias_names)]
    unload = [_removal("adapter", "/v1/loras", name, prune=prune) for name in sorted(set(adapters) - names)]
    changes = [
        *(change for change in unalias if change.name in names),
        *loads,
        *(change for change in puts if change.name not in adapters),
        *(change for change in unalias if change.name not in names),
        *unload,
        *(change for change in puts if change.name in adapters),
    ]
    return [change for change in changes if change.sign != "="]


def _removal(kind: str, route: str, name: str, *, prune: bool) -> PlannedChange:
    if prune:
        return PlannedChange("-", name, f"{kind}, not in the file", ("DELETE", f"{route}/{name}", None))
    return PlannedChange(" ", name, f"{kind}, not in the file: stays; --prune removes it", None)


def apply_changes(changes: Sequence[PlannedChange], call: Callable[..., Any], *, dry_run: bool) -> int:
    """Print every change, and apply it unless `dry_run`. Returns the exit status."""
    num_done = num_failed = 0
    for change in changes:
        print(f"{change.sign} {change.name}  {change.text}")
        if change.request is None or dry_run:
            continue
        try:
            call(*change.request)
        except ApiError as error:
            print(f"! {change.name}  {error}")
            num_failed += 1
        else:
            num_done += 1
    num_pending = sum(change.request is not None for change in changes)
    if dry_run:
        print(f"{num_pending} changes to make" if num_pending else "nothing to change")
    else:
        print(f"{num_done} changes made" + (f", {num_failed} failed" if num_failed else ""))
    return 1 if num_failed else 0


def _adapter_change(desired: DesiredAdapter, present: Mapping[str, Any] | None, *, reload: bool) -> PlannedChange:
    body = desired.model_dump()
    load = ("POST", "/v1/loras?wait=true", body)
    if present is None:
        return PlannedChange("+", desired.name, f"load {desired.path}", load)
    desired_fields = {"source": desired.path, "pinned": desired.pinned, "traffic_weight": desired.traffic_weight}
    text = ", ".join(
        f"{field} {present[field]} -> {value}" for field, value in desired_fields.items() if present[field] != value
    )
    if present["source"] != desired.path or reload:
        return PlannedChange("~", desired.name, text or "read again", load)
    if text:
        settings = {"pinned": desired.pinned, "traffic_weight": desired.traffic_weight}
        return PlannedChange("~", desired.name, text, ("PATCH", f"/v1/loras/{desired.name}", settings))
    return PlannedChange("=", desired.name, "", None)


def _alias_change(desired: DesiredAlias, present: Mapping[str, Any] | None) -> PlannedChange:
    put = ("PUT", f"/v1/aliases/{desired.name}", {"targets": desired.targets})
    if present is None:
        return PlannedChange("+", desired.name, f"alias of {_weights(desired.targets)}", put)
    if present["targets"] == desired.targets:
        return PlannedChange("=", desired.name, "", None)
    return PlannedChange(
        "~", desired.name, f"alias of {_weights(present['targets'])} -> {_weights(desired.targets)}", put
    )


def _weights(targets: Mapping[str, float]) -> str:
    total = sum(targets.values())
    return " + ".join(f"{100 * weight / total:g} % {name}" for name, weight in targets.items())
