"""A proxy is used as the service itself, and calls nothing that the service does not offer."""

from __future__ import annotations

from typing import Any

import pytest

from app.deployments.rpc.actor_proxy import actor_proxy, find_remote_method, remote_method
from app.deployments.store.actor import AdapterStoreActor, storage_service, store_service, tenants_service
from tests.deployments.scripted_actor import Scripted


class Greeter:
    @remote_method
    async def greet(self, name: str, *, mark: str = ".") -> str:
        return f"hello {name}{mark}"

    async def forget(self) -> None: ...

    def _secret(self) -> None: ...


class Called(Scripted):
    """An actor that remembers what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, method: Any, *args: Any, **options: Any) -> Any:
        self.calls.append((method, args, options))
        return "answer"


async def test_a_call_goes_to_the_actor_with_its_arguments() -> None:
    actor = Called()
    assert await actor_proxy(Greeter, actor).greet("ada", mark="!") == "answer"
    assert actor.calls == [(Greeter.greet, ("ada",), {"mark": "!"})]


async def test_a_service_inside_an_actor_is_called_by_name() -> None:
    actor = Called()
    await tenants_service(actor).project("p")
    await storage_service(actor).release("holder")
    await store_service(actor).job("j", tenant_id="t")
    assert actor.calls[0] == (AdapterStoreActor.tenants, ("project", ("p",), {}), {})
    assert actor.calls[1] == (AdapterStoreActor.storage, ("release", ("holder",), {}), {})
    assert [call[0].__name__ for call in actor.calls] == ["tenants", "storage", "job"]


@pytest.mark.parametrize("name", ["forget", "_secret", "missing", "__reduce_ex__"])
def test_what_is_not_marked_cannot_be_called(name: str) -> None:
    with pytest.raises(AttributeError):
        find_remote_method(Greeter(), name)
    if not name.startswith("__"):
        with pytest.raises(AttributeError):
            getattr(actor_proxy(Greeter, Called()), name)
