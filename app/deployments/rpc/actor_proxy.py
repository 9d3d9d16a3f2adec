"""Typed proxy of a service that lives in a named actor.

A service is a plain class without Ray; `remote_method` marks the methods that other processes may call. `actor_proxy`
returns an object with the service's methods, signatures and exceptions. Each call also raises ActorUnavailable (a
NotReady) while the actor restarts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:  # services import this module, and none of them imports Ray
    from app.deployments.rpc.named_actor import NamedActor

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Awaitable[Any]])

#: A method of an actor that calls a method of an object inside it: (actor, method name, arguments, options).
Dispatch = Callable[[Any, str, tuple[Any, ...], Mapping[str, Any]], Awaitable[Any]]


def remote_method(method: M) -> M:
    """Allow other processes to call this method of a service."""
    vars(method)["is_remote"] = True
    return method


def find_remote_method(service: object, name: str) -> Callable[..., Awaitable[Any]]:
    """A service's method by name (of the class or an object). Raises AttributeError unless it is marked."""
    method: Callable[..., Awaitable[Any]] = getattr(service, name)
    if not getattr(method, "is_remote", False):
        raise AttributeError(f"{name!r} of {service} is not a remote method")
    return method


def actor_proxy(service: type[T], actor: NamedActor, dispatch: Dispatch | None = None) -> T:
    """A proxy of the service in an actor. Several proxies may share an actor.

    `dispatch`: the actor's method that calls the service, if the actor is not the service itself but contains it.
    """
    return cast(T, _ActorProxy(service, actor, dispatch))


class _ActorProxy:
    def __init__(self, service: type, actor: NamedActor, dispatch: Dispatch | None) -> None:
        self._service = service
        self._actor = actor
        self._dispatch = dispatch

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = find_remote_method(self._service, name)

        @wraps(method)
        async def call(*args: Any, **options: Any) -> Any:
            if self._dispatch is None:
                return await self._actor.call(method, *args, **options)
            return await self._actor.call(self._dispatch, name, args, options)

        return call
