"""`polylora apply`: make a running service's adapters and aliases match a file.

Prints the difference and applies it. Applying twice changes nothing. Names that the file does not mention stay unless
`--prune` is given; a file without adapters removes none. Adapters are created before the combinations of them and the
aliases that point to them, and removed after these. A failed change does not stop the others; the exit status is 1
then.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import quote

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.cli.api_client import ApiClient, ApiError, add_url_option
from app.cli.config_file import yaml_problem
from app.config import TrafficWeight
from app.engine.errors import ConfigError
from app.model_names import Name, NameReference, split_version
from app.suggestions import complaints

DEFAULT_FILE = "configs/adapters.yaml"


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DesiredPart(_FileModel):
    """A part of a combination."""

    name: NameReference
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0


class DesiredCombination(_FileModel):
    """The parts and, as the service takes them, the fields of the method (`density`, `svd_rank`, …)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    adapters: tuple[DesiredPart, ...] = Field(min_length=1)
    method: str = "cat"

    @property
    def method_fields(self) -> dict[str, Any]:
        """The method and its fields that are given."""
        return self.model_dump(exclude={"adapters"}, exclude_none=True)


class DesiredAdapter(_FileModel):
    """An adapter as in `POST /v1/loras`. `tenant`: the project that it belongs to; "" for none.

    `description` and `defaults` None: whatever the service has. Not `lazy`: it is loaded.
    """

    name: Name
    path: str | None = None
    combine: DesiredCombination | None = None
    lazy: bool = False
    pinned: bool = False
    traffic_weight: TrafficWeight = 1.0
    description: str | None = None
    defaults: dict[str, Any] | None = None
    tenant: str = ""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.path is None) == (self.combine is None):
            raise ValueError("give either path, where the adapter is, or combine, its parts")
        if self.lazy and (self.combine is not None or self.pinned):
            raise ValueError("lazy is for an adapter with a path that is not pinned")
        return self

    @property
    def part_names(self) -> list[str]:
        """The plain names of a combination's parts."""
        return [] if self.combine is None else [split_version(part.name)[0] for part in self.combine.adapters]

    @property
    def body(self) -> dict[str, Any]:
        """The body of `POST /v1/loras`."""
        omitted = {"tenant"} | ({"pinned"} if self.lazy else {"lazy"})
        return self.model_dump(exclude=omitted, exclude_none=True)


class DesiredAlias(_FileModel):
    """`tenant`: see `DesiredAdapter`."""

    name: Name
    targets: dict[NameReference, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    tenant: str = ""


class DesiredState(_FileModel):
    """The whole file."""

    adapters: tuple[DesiredAdapter, ...] = ()
    aliases: tuple[DesiredAlias, ...] = ()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        for (_, name), count in Counter(self._keys).items():
            if count > 1:
                raise ValueError(f"the name {name!r} is used twice; adapters and aliases share one namespace")
        return self

    @property
    def _keys(self) -> list[tuple[str, str]]:
        """The tenant and the name of every entry."""
        adapters = [(each.tenant, each.name) for each in self.adapters]
        return adapters + [(each.tenant, each.name) for each in self.aliases]

    @property
    def tenants(self) -> list[str]:
        """The tenants that the file mentions; first the public one, whose adapters others may combine."""
        return sorted({"", *(tenant for tenant, _ in self._keys)})

    def of(self, tenant: str) -> DesiredState:
        """A tenant's part of the file."""
        adapters = tuple(each for each in self.adapters if each.tenant == tenant)
        return DesiredState(adapters=adapters, aliases=tuple(each for each in self.aliases if each.tenant == tenant))


class PlannedChange(NamedTuple):
    """One line of the difference and its request; `request` None: no change. `loads`: whether the name may mean other
    contents afterwards."""

    sign: str
    name: str
    text: str
    request: tuple[str, str, Mapping[str, Any] | None] | None
    loads: bool = False


def add_apply(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("apply", help="make a running service's adapters match a file")
    parser.add_argument("file", type=Path, nargs="?", default=Path(DEFAULT_FILE), help=f"default: {DEFAULT_FILE}")
    add_url_option(parser)
    parser.add_argument("--prune", action="store_true", help="remove what the file does not mention")
    parser.add_argument(
        "--reload", action="store_true", help="load every adapter again, because its files may have changed"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the difference and change nothing")
    parser.set_defaults(run=_apply)


def _apply(arguments: argparse.Namespace) -> int:
    desired = read_desired_state(arguments.file)
    changes: list[tuple[PlannedChange, Callable[..., Any]]] = []
    public: dict[str, Any] = {}
    for tenant in desired.tenants:
        service = ApiClient(arguments.url, project=tenant)
        adapters = {item["id"]: item for item in service.list_all("/v1/loras")}
        aliases = {item["id"]: item for item in service.list_all("/v1/aliases")}
        if arguments.prune and adapters and "adapters" not in desired.model_fields_set:
            raise ConfigError(
                f"the file does not mention adapters, and --prune would remove all {len(adapters)} of the service; "
                "write 'adapters: []' if there are to be none"
            )
        public = public or adapters
        found = difference(
            desired.of(tenant), adapters, aliases, prune=arguments.prune, reload=arguments.reload, public=public
        )
        changes += [(change, service.call) for change in found]
    return apply_changes(changes, dry_run=arguments.dry_run)


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
        raise ConfigError(f"{path}: {complaints(error, DesiredState, 'file')}") from error


def difference(
    desired: DesiredState,
    adapters: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, Mapping[str, Any]],
    *,
    prune: bool,
    reload: bool,
    public: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[PlannedChange]:
    """The changes of one tenant in the order in which they can be made: a name is free before it means the other kind.

    adapters, aliases: what the service has, by name. public: the adapters that every tenant may combine, by name.
    Raises ConfigError for combinations that are parts of each other.
    """
    names, alias_names = ({entry.name for entry in entries} for entries in (desired.adapters, desired.aliases))
    loads: list[PlannedChange] = []
    parts = {**public, **adapters}
    for entry in _parts_first(desired.adapters):
        loaded = {change.name for change in loads if change.loads}
        is_new = any(name in loaded for name in entry.part_names)
        loads.append(_adapter_change(entry, adapters.get(entry.name), parts, reload=reload or is_new))
    puts = [_alias_change(entry, aliases.get(entry.name)) for entry in desired.aliases]
    unalias = [_removal("alias", "/v1/aliases", name, prune=prune) for name in sorted(set(aliases) - alias_names)]
    unwanted = sorted(set(adapters) - names, key=lambda name: (not adapters[name].get("combine"), name))
    unload = [_removal("adapter", "/v1/loras", name, prune=prune) for name in unwanted]
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


def apply_changes(changes: Sequence[tuple[PlannedChange, Callable[..., Any]]], *, dry_run: bool) -> int:
    """Print every change, and unless `dry_run` make it with its function. Returns the exit status."""
    num_done = num_failed = 0
    for change, call in changes:
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
    num_pending = sum(change.request is not None for change, _ in changes)
    if dry_run:
        print(f"{num_pending} changes to make" if num_pending else "nothing to change")
    else:
        print(f"{num_done} changes made" + (f", {num_failed} failed" if num_failed else ""))
    return 1 if num_failed else 0


def _parts_first(entries: Sequence[DesiredAdapter]) -> list[DesiredAdapter]:
    """The adapters in the file's order, but combinations behind their parts. Raises ConfigError for a circle."""
    ordered: list[DesiredAdapter] = []
    left = list(entries)
    while left:
        waiting = {entry.name for entry in left}
        ready = [entry for entry in left if not waiting.intersection(entry.part_names)]
        if not ready:
            raise ConfigError(f"the combinations {', '.join(sorted(waiting))} are parts of each other")
        ordered += ready
        left = [entry for entry in left if entry not in ready]
    return ordered


def _adapter_change(
    desired: DesiredAdapter,
    present: Mapping[str, Any] | None,
    parts: Mapping[str, Mapping[str, Any]],
    *,
    reload: bool,
) -> PlannedChange:
    """`parts`: the adapters that a combination may have, by name."""
    load = ("POST", f"/v1/loras{'' if desired.lazy else '?wait=true'}", desired.body)
    wanted_source = desired.path if desired.combine is None else _combination_text(desired.combine)
    if present is None:
        verb = "register" if desired.lazy else "load"
        return PlannedChange("+", desired.name, f"{verb} {wanted_source}", load, loads=True)
    settings = {
        "pinned": desired.pinned,
        "traffic_weight": desired.traffic_weight,
        "description": desired.description,
        "defaults": desired.defaults,
    }
    changed = {name: value for name, value in settings.items() if value is not None and present[name] != value}
    text = [f"{name} {present[name]} -> {value}" for name, value in changed.items()]
    if desired.combine is None:
        is_same = present["source"] == desired.path
    else:
        is_same = _is_same(desired.combine, present, parts)
    if not is_same:
        text.insert(0, f"source {present['source']} -> {wanted_source}")
    is_read = present.get("state") != "REGISTERED"
    if is_same and not is_read and not desired.lazy and not changed:
        request = ("POST", f"/v1/loras/{quote(desired.name)}/load", None)
        return PlannedChange("~", desired.name, "load", request, loads=True)
    if not is_same or (reload and (is_read or not desired.lazy)):
        if desired.lazy and is_read:  # what is served is replaced by a load only
            load = ("POST", "/v1/loras?wait=true", desired.body | {"lazy": False})
        return PlannedChange("~", desired.name, ", ".join(text) or "read again", load, loads=True)
    if text and not is_read and not desired.lazy:  # also loads it
        return PlannedChange("~", desired.name, ", ".join([*text, "load"]), load, loads=True)
    if text:
        return PlannedChange("~", desired.name, ", ".join(text), ("PATCH", f"/v1/loras/{quote(desired.name)}", changed))
    return PlannedChange("=", desired.name, "", None)


def _combination_text(combination: DesiredCombination) -> str:
    parts = "+".join(f"{part.name}*{part.weight:g}" for part in combination.adapters)
    return f"{combination.method}({parts})"


def _is_same(
    desired: DesiredCombination, present: Mapping[str, Any], adapters: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether a registered adapter is this combination of the present contents of its parts."""
    combine = present.get("combine")
    if not combine or {name: value for name, value in combine.items() if name != "adapters"} != desired.method_fields:
        return False
    parts = [(*split_version(part["name"]), part["weight"]) for part in combine["adapters"]]
    weights = {name: weight for name, _, weight in parts}
    if weights != {split_version(part.name)[0]: part.weight for part in desired.adapters}:
        return False
    return all(
        name not in adapters or version is None or version.generation == adapters[name]["generation"]
        for name, version, _ in parts
    )


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
