"""The base models of one ingress: which of them a request is for.

Each has an `IngressService` of its own, in the order of the settings. The first also answers what is common to all:
projects, keys, usage, files and batches. A base model's own name comes first; otherwise a name means the adapter or
alias that has it, the caller's own before shared and public ones. If several base models have one, the first counts,
and `base:name` means any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from app.deployments.ingress.principal import Principal
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest, ModelNotFound
from app.model_names import split_version


class BaseModels:
    """One per ingress. `services`: at least one."""

    def __init__(self, services: Sequence[IngressService]) -> None:
        self.services = tuple(services)
        self.first = self.services[0]

    @property
    def names(self) -> str:
        return ", ".join(service.base_name for service in self.services)

    def with_base_name(self, base_name: str) -> IngressService:
        """The base model of this name. Raises NotFound."""
        found = self._find_base(base_name)
        if found is None:
            raise ModelNotFound(f"there is no base model {base_name[:80]!r} here; there are {self.names}")
        return found

    def serving(self, name: str, caller: Principal) -> IngressService | None:
        """The base model that a request with this `model` is for; None if the caller may use nothing of this name."""
        base, colon, _ = name.partition(":")
        found = self._find_base(name) or (self._find_base(base) if colon else None)
        if found is not None:
            return found
        plain, _ = split_version(name)
        for owner_id in caller.owners(plain):
            if (found := self.having(plain, owner_id)) is not None:
                return found
        return None

    def model_id(self, service: IngressService, name: str, caller: Principal) -> str:
        """What the caller names an adapter or alias of a base model by: `base:name` where the name alone means
        another."""
        is_plain = len(self.services) == 1 or self.serving(name, caller) is service
        return name if is_plain else f"{service.base_name}:{name}"

    def having(self, name: str, tenant_id: str) -> IngressService | None:
        """The first base model for which the tenant has an adapter or alias of this name."""
        plain, _ = split_version(name)
        return next((each for each in self.services if plain in each.registry.names(tenant_id)), None)

    def of_body(self, body: object, caller: Principal) -> IngressService:
        """The base model of an inference request: the first that `model`, `lora_path` or `adapters` names, else the
        first of all."""
        found = (self.serving(name, caller) for name in _model_names(body))
        return next((service for service in found if service is not None), self.first)

    def registering(
        self, names: Sequence[str], base_name: str | None, caller: Principal, parts: Iterable[str] = ()
    ) -> IngressService:
        """The base model for new or changed adapters or aliases of the caller: `base_name`, or the one that has the
        first name, or the first of `parts` (what a combination or an alias stands for).

        Raises NotFound for an unknown base model, InvalidRequest if there are several and none is named, or if another
        one has such a name already.
        """
        owner_id = caller.tenant_id
        chosen: IngressService | None = self.first if len(self.services) == 1 else None
        if base_name is not None:
            chosen = self.with_base_name(base_name)
        elif chosen is None and names:
            chosen = self.having(names[0], owner_id)
        for part in parts:
            chosen = chosen or self.serving(part, caller)
        if chosen is None:
            which = f"{names[0][:80]!r} is new, and this" if names else "this"
            raise InvalidRequest(
                f"{which} service has several base models; add ?base_model= with one of {self.names}",
                param="base_model",
            )
        for other in self.services:
            taken = other.registry.names(owner_id) if other is not chosen else ()
            for name in names if other is not chosen else ():
                if name == other.base_name or name in taken:
                    raise InvalidRequest(
                        f"the name {name[:80]!r} belongs to the base model {other.base_name!r}; choose another, or "
                        f"unload it there first (?base_model={other.base_name})",
                        param="name",
                    )
        return chosen

    def _find_base(self, name: str) -> IngressService | None:
        return next((each for each in self.services if each.preprocessor.resolver.is_base(name)), None)


def _model_names(body: object) -> Iterator[str]:
    """The names in a request's body that say which base model it is for, whatever else the body is."""
    if not isinstance(body, Mapping):
        return
    paths = body.get("lora_path")
    for value in (body.get("model"), *(paths if isinstance(paths, list) else [paths])):
        if isinstance(value, str):
            yield value
    yield from names_in(body.get("adapters"))


def names_in(entries: Any) -> Iterator[str]:
    """The `name` of each entry of a list."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and isinstance(name := entry.get("name"), str):
            yield name
