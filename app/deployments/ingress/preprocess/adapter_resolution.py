"""What a client means by a model's name: the base, an adapter, or several adapters at once.

In: `model`, `lora_path` and `adapters` of a request, and its caller. Out: an adapter reference, or None for the base.
Rule: a name that there is not, another tenant's, and one that the caller may not use are the same 404 in the same
words. Before a name is a 404 the store may know where its adapter is, and one that is registered and has not been read
is read first (`LazyAdapterLoader`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from app.deployments.ingress.preprocess.adapter_combination import combined
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.lazy_adapter_loader import LazyAdapterLoader
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.registry.feed.view import RegistryView
from app.deployments.tenancy.usage.prices import paid_models
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import Combination, CombinationMethod
from app.engine.errors import InvalidRequest, NotFound, NotReady


class _Unread(Exception):
    """A name means an adapter that nobody has read yet."""

    def __init__(self, ref: AdapterRef) -> None:
        super().__init__(ref.name)
        self.ref = ref


class AdapterResolver:
    """One per ingress."""

    def __init__(
        self, base_name: str, registry: RegistryView, names: AdapterDirectory, lazy_loader: LazyAdapterLoader
    ) -> None:
        self._base_name = base_name
        self._registry = registry
        self._names = names
        self._lazy_loader = lazy_loader

    async def find(
        self,
        model: str,
        caller: Principal,
        lora_path: str | None = None,
        user: str | None = None,
        adapters: Sequence[WeightedAdapter] | None = None,
    ) -> AdapterRef | None:
        """What a client means by `model` ("<base>", "<adapter>", "<base>:<adapter>"), `lora_path` and `adapters`.

        `lora_path` is a registered name or alias, never a path. An alias of several adapters sends equal users to
        the same one, and a request without a user to any. `adapters` are several at once, on the base. None is the
        base. Raises InvalidRequest, and NotFound in the same words for a name that there is not, another tenant's, and
        one that the caller may not use; for a name that nobody has registered, and for one that is not read yet, what
        `LazyAdapterLoader` raises.
        """
        sticky_key = _sticky_key(user)
        try:
            ref = await self._read(model, caller, lora_path, sticky_key, adapters)
        except NotFound:
            chosen = self._chosen_name(model, lora_path)
            names = [one.name for one in adapters] if adapters is not None else [chosen] if chosen is not None else []
            if not await self._lazy_loader.register(names, caller):
                raise
            ref = await self._read(model, caller, lora_path, sticky_key, adapters)
        if ref is not None:
            self._names.expect(ref)
        return ref

    def combined(
        self,
        adapters: Sequence[WeightedAdapter],
        caller: Principal,
        user: str | None = None,
        recipe: CombinationMethod | None = None,
    ) -> Combination:
        """Several registered adapters that the caller may use, as one. Raises InvalidRequest, NotFound."""
        try:
            return self._combined(adapters, caller, _sticky_key(user), recipe)
        except _Unread as unread:
            name = unread.ref.name
            raise InvalidRequest(
                f"adapter {name!r} is not read yet; load it first: POST /v1/loras/{name}/read", param="adapters"
            ) from None

    def _combined(
        self,
        adapters: Sequence[WeightedAdapter],
        caller: Principal,
        sticky_key: str,
        recipe: CombinationMethod | None = None,
    ) -> Combination:
        return combined(adapters, lambda name: self._named(name, caller, sticky_key, name), recipe)

    async def _read(
        self,
        model: str,
        caller: Principal,
        lora_path: str | None,
        sticky_key: str,
        adapters: Sequence[WeightedAdapter] | None,
    ) -> AdapterRef | None:
        """`_propose`, once all that it names has been read."""
        seen: set[tuple[str, str]] = set()
        while True:
            try:
                return self._found(model, caller, lora_path, sticky_key, adapters)
            except _Unread as unread:
                ref = unread.ref
            if (ref.tenant_id, ref.name) in seen:  # registered anew meanwhile, or this copy is behind
                raise NotReady(f"adapter {ref.name!r} is being registered; send the request again", retry_after_s=1)
            seen.add((ref.tenant_id, ref.name))
            await self._lazy_loader.read(ref.name, ref.tenant_id, caller)

    def _found(
        self,
        model: str,
        caller: Principal,
        lora_path: str | None,
        sticky_key: str,
        adapters: Sequence[WeightedAdapter] | None,
    ) -> AdapterRef | None:
        if adapters is not None:
            if model != self._base_name or lora_path is not None:
                raise InvalidRequest(
                    f"adapters lists all adapters of a request: let model be {self._base_name!r}, without a lora_path",
                    param="adapters",
                )
            return self._combined(adapters, caller, sticky_key).ref(caller.tenant_id)
        shown = model if lora_path is None else lora_path
        chosen = self._chosen_name(model, lora_path)
        if chosen is not None:
            return self._named(chosen, caller, sticky_key, shown)
        if caller.tenant.may_use(self._base_name):
            return None
        raise _not_found(shown)

    def _chosen_name(self, model: str, lora_path: str | None) -> str | None:
        """The name of an adapter or alias; None: the base is meant. Raises InvalidRequest where two are named."""
        if model == self._base_name:
            return lora_path
        base, colon, adapter_name = model.partition(":")
        chosen = adapter_name if colon and base == self._base_name else model
        if lora_path is not None and lora_path != chosen:
            raise InvalidRequest(
                f"model names adapter {chosen[:80]!r} but lora_path names {lora_path[:80]!r}; use one of them",
                param="lora_path",
            )
        return chosen

    def _named(self, name: str, caller: Principal, sticky_key: str, shown: str) -> AdapterRef | None:
        """An adapter or alias; None is the base. `shown`: what the client has called it. Raises NotFound, _Unread."""
        for owner_id in caller.owners(name):
            if self._registry.means_base(name, self._base_name, sticky_key, owner_id):
                if not self._may_mean(None, owner_id, caller):
                    break
                return None
            if (ref := self._registry.resolve(name, sticky_key, owner_id)) is not None:
                if not self._may_mean(ref, owner_id, caller):
                    break
                if not ref.digest:
                    raise _Unread(ref)
                return ref
        raise _not_found(shown)

    def _may_mean(self, ref: AdapterRef | None, owner_id: str, caller: Principal) -> bool:
        """Whether a name that the caller may use may mean this for it; None is the base.

        What is denied is denied under every name, and in every combination. Where names are allowed, an alias stands
        for what its owner has made it stand for; but nobody lets itself use the base.
        """
        tenant = caller.tenant
        if tenant.model_mode is None:
            return True
        if tenant.model_mode == "deny_list":
            return all(tenant.may_use(each) for each in paid_models(ref, self._base_name))
        return ref is not None or owner_id != caller.tenant_id or tenant.may_use(self._base_name)


def _sticky_key(user: str | None) -> str:
    """Equal users are sent to the same one of an alias's adapters; without a user any."""
    return secrets.token_hex(8) if user is None else f"user {user}"


def _not_found(name: str) -> NotFound:
    return NotFound(f"there is no model or adapter {name[:160]!r}; GET /v1/models lists what there is")
