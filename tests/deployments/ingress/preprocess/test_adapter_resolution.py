"""Which adapter a name means for a caller, by owner and name, at the time of each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from app.deployments.ingress.preprocess.adapter_resolution import AdapterResolver
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import AliasEntry, AliasTarget, CatalogEntry
from app.deployments.tenancy.models import PUBLIC, Tenant
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import Combination
from app.engine.errors import NotFound


class Directory:
    """No text, and nothing to prefetch."""

    def prefetch(self, ref: AdapterRef) -> None:
        pass

    def text(self, ref: AdapterRef) -> str:  # noqa: ARG002
        return ""


class NotLoading:
    async def register(self, names: Any, caller: Principal) -> bool:  # noqa: ARG002
        return False


def entry(owner_id: str, name: str, *, digest: str = "", is_zero: bool = False) -> CatalogEntry:
    ref = AdapterRef(name, digest or f"{owner_id} {name}", owner_id, 1, f"/srv/{owner_id}/{name}")
    return CatalogEntry(ref, 8, 1, 0.0, "o", is_zero=is_zero)


class World:
    """Names of the public, of `owner` and of `user`; tenants' rights may change between requests."""

    def __init__(self, *entries: CatalogEntry | AliasEntry) -> None:
        self.view = RegistryView(entries)
        self.tenants = {"default": PUBLIC} | {each: Tenant(each, each, 0.0) for each in ("owner", "user")}
        self.resolver = AdapterResolver("base", "ba5e" * 16, self.view, Directory(), NotLoading(), self.tenants.get)  # type: ignore[arg-type]

    def rights(self, tenant_id: str, **rights: Any) -> None:
        self.tenants[tenant_id] = Tenant(tenant_id, tenant_id, 0.0, **rights)

    def caller(self, tenant_id: str) -> Principal:
        return Principal(tenant_id, "k", self.tenants[tenant_id], "k", "project")

    async def means(self, name: str, tenant_id: str = "user", weights: Mapping[str, float] | None = None) -> str:
        """Owner and name of what is served; "base"; or "404"."""
        adapters = None if weights is None else [WeightedAdapter(name=n, weight=w) for n, w in weights.items()]
        try:
            ref = await self.resolver.resolve(name, self.caller(tenant_id), adapters=adapters)
        except NotFound:
            return "404"
        return "base" if ref is None else f"{ref.tenant_id}/{ref.name}"

    def keep(self, tenant_id: str, name: str, *parts: str) -> Combination:
        """Register a combination of what the tenant may use now."""
        weighted = [WeightedAdapter(name=part, weight=0.5) for part in parts]
        combination = self.resolver.combine(weighted, self.caller(tenant_id))
        ref = AdapterRef(name, combination.digest, tenant_id, 1, combination.source)
        self.view.apply([((tenant_id, name), CatalogEntry(ref, 8, 1, 0.0, tenant_id))])
        return combination


SHARED = frozenset({("owner", "secret")})


async def test_a_share_that_is_taken_back_ends_its_use_in_combinations() -> None:
    world = World(entry("owner", "secret"), entry("default", "sql"))
    world.rights("user", shared=SHARED)
    world.keep("user", "kept", "secret")
    world.keep("user", "mixed", "kept", "sql")
    world.view.apply([(("user", "al"), AliasEntry("al", (AliasTarget("kept", 1.0),), 1, 0.0, tenant_id="user"))])
    names = ("kept", "mixed", "al")
    assert [await world.means(name) for name in names] == ["user/kept", "user/mixed", "user/kept"]
    assert world.view.dependents("owner", "secret") == [("user", "kept")]
    world.rights("user")
    assert [await world.means(name) for name in names] == ["404"] * 3
    with pytest.raises(NotFound):
        world.keep("user", "again", "kept")
    world.rights("user", shared=SHARED)
    assert await world.means("mixed") == "user/mixed"
    world.view.apply([(("owner", "secret"), None)])
    assert await world.means("kept") == "404", "its owner has unloaded it"
    world.view.apply([(("user", "kept"), None)])
    assert world.view.dependents("owner", "secret") == []


async def test_a_shared_alias_may_be_a_part() -> None:
    alias = AliasEntry("prod", (AliasTarget("v1", 1.0),), 1, 0.0, tenant_id="owner")
    world = World(entry("owner", "v1"), alias)
    world.rights("user", shared=frozenset({("owner", "prod")}))
    world.keep("user", "kept", "prod")
    assert await world.means("kept") == "user/kept"
    world.rights("user")
    assert await world.means("kept") == "404"


async def test_a_shared_combination_needs_what_its_owner_may_use() -> None:
    world = World(entry("owner", "a"), entry("third", "b"), entry("default", "sql"))
    world.rights("owner", shared=frozenset({("third", "b")}))
    world.keep("owner", "mix", "a", "b")
    world.rights("user", shared=frozenset({("owner", "mix")}))
    assert await world.means("mix") == "owner/mix", "its parts need no share of their own"
    world.rights("owner")
    assert await world.means("mix") == "404"


async def test_a_permission_that_is_taken_back_ends_its_use_in_own_combinations() -> None:
    world = World(entry("default", "sql"), entry("default", "law"))
    world.rights("user", model_mode="allow_list", model_ids=frozenset({"sql", "law", "user:kept"}))
    world.keep("user", "kept", "sql", "law")
    assert await world.means("kept") == "user/kept"
    world.rights("user", model_mode="allow_list", model_ids=frozenset({"law", "user:kept"}))
    assert await world.means("kept") == "404"
    world.rights("user", model_mode="deny_list", model_ids=frozenset({"sql"}))
    assert await world.means("kept") == "404"


async def test_an_allowed_name_is_one_owner_s() -> None:
    world = World(entry("default", "legal"), entry("user", "legal"), entry("owner", "legal"), entry("user", "mine"))
    assert await world.means("legal") == "user/legal"
    shared = frozenset({("owner", "legal")})
    world.rights("user", model_mode="allow_list", model_ids=frozenset({"legal"}), shared=shared)
    assert (await world.means("legal"), await world.means("mine")) == ("default/legal", "404")
    world.view.apply([(("default", "legal"), None)])
    assert await world.means("legal") == "404"
    world.rights("user", model_mode="allow_list", model_ids=frozenset({"user:legal", "user:mine"}))
    assert (await world.means("legal"), await world.means("mine")) == ("user/legal", "user/mine")
    world.rights("user", model_mode="deny_list", model_ids=frozenset({"legal"}), shared=shared)
    assert await world.means("legal") == "404", "denied whoever owns it"
    world.rights("user", model_mode="deny_list", model_ids=frozenset({"user:legal"}))
    assert (await world.means("legal"), await world.means("mine")) == ("404", "user/mine")


@pytest.mark.parametrize(
    "rights",
    [
        {"model_mode": "deny_list", "model_ids": frozenset({"base"})},
        {"model_mode": "allow_list", "model_ids": frozenset({"user:zero", "user:mine", "user:al"})},
    ],
    ids=["denied", "not allowed"],
)
async def test_a_denied_base_model_is_reached_by_no_detour(rights: Any) -> None:
    alias = AliasEntry("al", (AliasTarget("base", 1.0),), 1, 0.0, tenant_id="user")
    world = World(entry("user", "zero", is_zero=True), entry("user", "mine"), alias)
    assert [await world.means(name) for name in ("base", "zero", "al")] == ["base", "user/zero", "base"]
    world.rights("user", **rights)
    assert [await world.means(name) for name in ("base", "zero", "al", "mine")] == ["404", "404", "404", "user/mine"]
    assert await world.means("base", weights={"zero": 0.5}) == "404"
    assert await world.means("base", weights={"zero": 1.0, "mine": 0.5}) == "404"
