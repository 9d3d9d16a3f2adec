"""Resolution of `model`, `lora_path` and `adapters` to the base model, an adapter or a combination.

A name that does not exist, another tenant's, and one that the caller may not use give the same 404 with the same
message. Before a 404 the store's resolvers may find the adapter, and one that is registered but not loaded is loaded
first (`LazyAdapterLoader`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import chain

from app.deployments.ingress.preprocess.adapter_combination import combination_of
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.lazy_adapter_loader import LazyAdapterLoader
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.registry.feed.view import RegistryView, choose_target
from app.deployments.registry.models import DEFAULT_TENANT, AliasEntry, model_id
from app.deployments.tenancy.models import Tenant
from app.deployments.tenancy.usage.prices import paid_models
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import (
    Combination,
    CombinationMethod,
    is_combination,
    parse_combination,
)
from app.engine.errors import InvalidRequest, ModelNotFound, NotFound, NotReady
from app.model_names import ModelVersion, split_version


class _NeedsLoad(Exception):
    """A name refers to a registered adapter that has not been loaded yet."""

    def __init__(self, ref: AdapterRef) -> None:
        super().__init__(ref.name)
        self.ref = ref


class AdapterResolver:
    """One per ingress."""

    def __init__(
        self,
        base_name: str,
        base_digest: str,
        registry: RegistryView,
        directory: AdapterDirectory,
        lazy_loader: LazyAdapterLoader,
        find_tenant: Callable[[str], Tenant | None],
    ) -> None:
        self._base_name = base_name
        self._base_digest = base_digest
        self._registry = registry
        self._directory = directory
        self._lazy_loader = lazy_loader
        self._find_tenant = find_tenant

    async def resolve(
        self,
        model: str | None,
        caller: Principal,
        lora_path: str | None = None,
        user: str | None = None,
        adapters: Sequence[WeightedAdapter] | None = None,
    ) -> AdapterRef | None:
        """The adapter meant by `model` ("<base>", "<adapter>", "<base>:<adapter>"), `lora_path` and `adapters`; None is
        the base model.

        Each name may have a version (`app.model_names`). A public alias of the base's name takes requests that name the
        base; `model` None, for requests that name no model, is the base itself. `lora_path` is a registered name or
        alias, never a path. An alias of several adapters sends equal users to the same one, and a request without a
        user to any. `adapters` are combined, on the base model. Raises InvalidRequest, NotFound, and for names that are
        not registered or not loaded the errors of `LazyAdapterLoader`.
        """
        sticky_key = _sticky_key(user)
        try:
            ref = await self._resolve_loaded(model, caller, lora_path, sticky_key, adapters)
        except NotFound:
            chosen = self._chosen_name(model, lora_path)
            names = [one.name for one in adapters] if adapters is not None else [chosen] if chosen is not None else []
            if not await self._lazy_loader.register(names, caller):
                raise
            ref = await self._resolve_loaded(model, caller, lora_path, sticky_key, adapters)
        if ref is not None:
            self._directory.prefetch(ref)
        return ref

    def combine(
        self,
        adapters: Sequence[WeightedAdapter],
        caller: Principal,
        user: str | None = None,
        method: CombinationMethod | None = None,
    ) -> Combination:
        """Several registered adapters that the caller may use, as one. Raises InvalidRequest, NotFound."""
        try:
            return self._combine(adapters, caller, _sticky_key(user), method)
        except _NeedsLoad as not_loaded:
            name = not_loaded.ref.name
            raise InvalidRequest(
                f"adapter {name!r} is not loaded yet; load it first: POST /v1/loras/{name}/load", param="adapters"
            ) from None

    def _combine(
        self,
        adapters: Sequence[WeightedAdapter],
        caller: Principal,
        sticky_key: str,
        method: CombinationMethod | None = None,
    ) -> Combination:
        combination = combination_of(adapters, lambda name: self._resolve_name(name, caller, sticky_key, name), method)
        self._directory.text(combination.ref(caller.tenant_id))  # raises if the parts' differ
        return combination

    async def _resolve_loaded(
        self,
        model: str | None,
        caller: Principal,
        lora_path: str | None,
        sticky_key: str,
        adapters: Sequence[WeightedAdapter] | None,
    ) -> AdapterRef | None:
        """`_resolve`, loading adapters until all named ones are loaded."""
        seen: set[tuple[str, str]] = set()
        while True:
            try:
                return self._resolve(model, caller, lora_path, sticky_key, adapters)
            except _NeedsLoad as not_loaded:
                ref = not_loaded.ref
            if (ref.tenant_id, ref.name) in seen:  # registered again meanwhile, or this copy is behind
                raise NotReady(f"adapter {ref.name!r} is being registered; send the request again", retry_after_s=1)
            seen.add((ref.tenant_id, ref.name))
            await self._lazy_loader.read(ref.name, ref.tenant_id, caller)

    def _resolve(
        self,
        model: str | None,
        caller: Principal,
        lora_path: str | None,
        sticky_key: str,
        adapters: Sequence[WeightedAdapter] | None,
    ) -> AdapterRef | None:
        if adapters is not None:
            if not (model is None or self.is_base(model)) or lora_path is not None:
                raise InvalidRequest(
                    f"a request with adapters must have model {self._base_name!r} and no lora_path",
                    param="adapters",
                )
            return self._combine(adapters, caller, sticky_key).ref(caller.tenant_id)
        shown_name = lora_path or model or self._base_name
        chosen = self._chosen_name(model, lora_path)
        if chosen is not None:
            return self._resolve_name(chosen, caller, sticky_key, shown_name)
        if caller.tenant.may_use(self._base_name):
            return None
        raise _not_found(shown_name)

    def is_base(self, name: str) -> bool:
        """Whether this is the base's name, perhaps with its version."""
        plain, version = split_version(name)
        return plain == self._base_name and (version is None or version.is_of(self._base_digest))

    def _chosen_name(self, model: str | None, lora_path: str | None) -> str | None:
        """The name of an adapter or alias; None means the base model. Raises InvalidRequest for two different names."""
        if model is None or self.is_base(model):
            is_alias = model == self._base_name and self._registry.alias(model, DEFAULT_TENANT) is not None
            return model if is_alias and lora_path is None else lora_path
        base, colon, adapter_name = model.partition(":")
        chosen = adapter_name if colon and self.is_base(base) else model
        if lora_path is not None and lora_path != chosen:
            raise InvalidRequest(
                f"model names adapter {chosen[:80]!r} but lora_path names {lora_path[:80]!r}; use one of them",
                param="lora_path",
            )
        return chosen

    def _resolve_name(self, name: str, caller: Principal, sticky_key: str, shown_name: str) -> AdapterRef | None:
        """An adapter or alias; None is the base model. `shown_name` is the client's spelling. Raises NotFound,
        _NeedsLoad."""
        plain, version = split_version(name)
        for owner_id in caller.owners(plain):
            alias = self._registry.alias(plain, owner_id)
            target = plain if alias is None else self._target(alias, sticky_key, version)
            if alias is not None and self.is_base(target):
                if not self._is_permitted(None, owner_id, caller):
                    break
                if version is not None and not version.is_of(self._base_digest):
                    raise _other_version(shown_name, self._base_digest, None)
                return None
            target_name, target_version = split_version(target)
            if (ref := self._registry.resolve(target_name, sticky_key, owner_id)) is not None:
                if not self._is_permitted(ref, owner_id, caller):
                    break
                if not ref.digest:
                    raise _NeedsLoad(ref)
                for each in (version, target_version):
                    if each is not None and not each.is_of(ref.digest, ref.generation):
                        raise _other_version(shown_name, ref.digest, ref.generation)
                return ref
        raise _not_found(shown_name)

    def _target(self, alias: AliasEntry, sticky_key: str, version: ModelVersion | None) -> str:
        """An alias's target for a request; one of this version, if the request names a version and there is one."""
        if version is not None:
            for target in sorted(alias.targets, key=lambda target: -target.weight):
                plain, _ = split_version(target.name)
                ref = self._registry.resolve(plain, sticky_key, alias.tenant_id)
                if self.is_base(target.name) and version.is_of(self._base_digest):
                    return target.name
                if ref is not None and version.is_of(ref.digest, ref.generation):
                    return target.name
        return choose_target(alias, sticky_key)

    def _is_permitted(self, ref: AdapterRef | None, owner_id: str, caller: Principal) -> bool:
        """Whether a name that the caller may use may refer to this adapter; None is the base model.

        A combination needs, now, that its owner may use each part. A deny list applies under every name and in every
        combination. With an allow list, an alias stands for whatever its owner chose, but a tenant cannot grant itself
        the base model, through its own alias or through an adapter of zeros.
        """
        tenant = caller.tenant
        if ref is not None and not self._has_parts(ref, caller):
            return False
        if tenant.model_mode is None:
            return True
        if ref is not None and not tenant.may_use(self._base_name):
            entry = self._registry.entry_of(ref)
            if entry is not None and entry.is_zero:
                return False
        if tenant.model_mode == "deny_list":
            return all(tenant.may_use(each) for each in paid_models(ref, self._base_name))
        return ref is not None or owner_id != caller.tenant_id or tenant.may_use(self._base_name)

    def _has_parts(self, ref: AdapterRef, caller: Principal) -> bool:
        """Whether the owner of a combination may still use all of its parts; True for any other adapter."""
        if not is_combination(ref.uri):
            return True
        owner = caller.tenant if ref.tenant_id == caller.tenant_id else self._find_tenant(ref.tenant_id)
        parts = [part.ref for part in parse_combination(ref.uri).parts]
        return owner is not None and all(
            self._may_use_part(owner, part) and self._has_parts(part, caller) for part in parts
        )

    def _may_use_part(self, owner: Tenant, part: AdapterRef) -> bool:
        """Whether a combination's owner may use an adapter by its name, or by a shared alias of it."""
        owner_id, is_own = part.tenant_id, part.tenant_id == owner.id
        if not is_own and part.name not in self._registry.names(owner_id):
            return False
        is_open = is_own or owner_id == DEFAULT_TENANT
        return any(
            (is_open or (owner_id, name) in owner.shared) and owner.may_use(model_id(owner_id, name))
            for name in chain((part.name,), self._registry.aliases_to(owner_id, part.name))
        )


def _sticky_key(user: str | None) -> str:
    """Equal users get the same adapter of an alias; without a user any."""
    return secrets.token_hex(8) if user is None else f"user {user}"


def _other_version(name: str, digest: str, generation: int | None) -> ModelNotFound:
    present = f"generation {generation}, {digest[:12]}" if generation is not None else digest[:12]
    return ModelNotFound(
        f"{name[:160]!r} names a version that is not served: the present contents are {present}. Only present contents "
        "are served under a name; register others under a name of their own"
    )


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"there is no model or adapter {name[:160]!r}; GET /v1/models lists what there is")
