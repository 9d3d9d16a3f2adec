"""Named actors that outlive their creators, and remote calls with plain exceptions.

A callee's exception reaches the caller as it was raised; Ray wraps it in a class of its own, which carries a remote
traceback and loses attributes. The first caller creates the actor, and Ray restarts it without limit; after an exit the
next call looks it up again. However an actor or its answer is lost, the caller gets `ActorUnavailable`. Nothing here
blocks an event loop: Ray looks actors up with a synchronous call to the head node, which takes a minute when that is
down, so a thread makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from app.deployments.rpc.actor_unavailable import ActorUnavailable, UnavailableLog
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.transport import PROTOCOL

T = TypeVar("T")
P = ParamSpec("P")

NAMESPACE = "polylora"
#: Concurrent calls of an actor. Every process has two or three long polls open; actors bound other waiting calls
#: themselves. Ray's concurrency groups do not help, because each has its own event loop.
MAX_CALLS = 20_000
#: About the time an actor takes to restart.
RESTART_S = 2.0
#: How long a call waits for an actor's lookup or creation, which continues for the next caller.
LOOK_UP_TIMEOUT_S = 5.0


async def unwrap_errors(call: Awaitable[T]) -> T:
    """The result of a remote call; raises the callee's own exception."""
    try:
        return await call
    except RayTaskError as error:
        raise _cause_of(error) from None


async def get_object(put: Awaitable[T]) -> T:
    """An object from the object store. Raises ActorUnavailable if it is lost: its owner died, or it was evicted."""
    try:
        return await put
    except RayError as error:
        raise ActorUnavailable(f"an object is lost ({type(error).__name__})", retry_after_s=RESTART_S) from error


def _cause_of(error: RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, Exception) else error


def exit_actor() -> None:
    """End the current actor for good."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class NamedActor:
    """A detached actor, by name. It is created as `kind(*args)` if missing; `resources` bind it to nodes that have
    them.

    Its name in Ray ends with the protocol number, so releases with different protocols use different actors.
    """

    def __init__(self, name: str, kind: type, *args: Any, resources: Mapping[str, float] | None = None) -> None:
        self._resources = dict(resources or {})
        self._name = f"{name}.v{PROTOCOL}"
        self._kind = kind
        self._args = args
        self._handle: Any = None
        self._lookup_task: asyncio.Task[Any] | None = None
        self._tasks = Tasks()
        self._unavailable_log = UnavailableLog(self._name)

    def start(self) -> Any:
        """Create the actor if it is missing, without waiting. Blocks; not for an event loop.

        `ray.get` of the result waits until the actor is ready, and raises why it could not be created.
        """
        self._handle = self._look_up()
        return self._handle.__ray_ready__.remote()

    async def call(self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """Call a method of the actor's class, by its name. Raises ActorUnavailable while the actor is down."""
        try:
            answer = await self._call(method, *args, **options)
        except ActorUnavailable as error:
            self._unavailable_log.on_error(error)
            raise
        except Exception:  # raised by the method
            self._unavailable_log.on_recovery()
            raise
        self._unavailable_log.on_recovery()
        return answer

    async def _call(self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """One call. Ray has a dozen errors for an unavailable actor, by what died (it, its node, the raylet, its
        memory)."""
        try:
            answer: T = await getattr(await self._actor(), method.__name__).remote(*args, **options)
        except RayTaskError as error:
            raise _cause_of(error) from None
        except RayError as error:
            if not isinstance(error, ActorUnavailableError):  # an unreachable actor is still the same
                self._handle = None  # it may have been removed: the next call looks it up again
            reason = f"{self._name} does not answer ({type(error).__name__}); try again"
            raise ActorUnavailable(reason, retry_after_s=RESTART_S) from error
        return answer

    async def _actor(self) -> Any:
        """The actor's handle. One lookup at a time, however many callers wait."""
        if self._handle is not None:
            return self._handle
        if self._lookup_task is None or self._lookup_task.done():
            self._lookup_task = self._tasks.start(asyncio.to_thread(self._find))
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                self._handle = await asyncio.shield(self._lookup_task)
        except TimeoutError:
            reason = f"{self._name} was not found within {LOOK_UP_TIMEOUT_S:g} s: Ray's head node may be down"
            raise ActorUnavailable(f"{reason}; try again", retry_after_s=RESTART_S) from None
        return self._handle

    def _find(self) -> Any:
        try:
            return self._look_up()
        except Exception as error:  # Ray has many errors for this
            reason = f"{self._name} cannot be found ({type(error).__name__}: {error}); try again"
            raise ActorUnavailable(reason, retry_after_s=RESTART_S) from error

    def _look_up(self) -> Any:
        """Look up or create the actor. Blocks, for up to a minute if Ray's head node does not answer."""
        remote: Any = ray.remote(self._kind).options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=MAX_CALLS,
            num_cpus=0,
            resources=self._resources,
        )
        return remote.remote(*self._args)


class FoundActor(NamedActor):
    """A named actor that others create; unavailable until they do."""

    def __init__(self, name: str) -> None:
        super().__init__(name, type(None))

    def _look_up(self) -> Any:
        return ray.get_actor(self._name, namespace=NAMESPACE)
