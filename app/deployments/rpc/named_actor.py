"""Calls through Ray with plain errors, and named actors that outlive their creators.

In: awaitables of Ray, and names of actors. Out: results, or the exception that the callee raised; Ray wraps it in a
class of its own, which carries a remote traceback and loses attributes. Whoever asks first creates a named actor, and
Ray restarts it without limit; the next call renews a handle to an actor that has left. However an actor or its answer
was lost, the caller hears `ActorUnavailable`. Rule: nothing here holds up an event loop. Ray looks an actor up with a
synchronous question to the head node, which takes a minute when that is down: a thread asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from app.deployments.rpc.actor_unavailable import ActorUnavailable, UnavailableLog
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.wire_version import PROTOCOL

T = TypeVar("T")
P = ParamSpec("P")

NAMESPACE = "polylora"


#: Calls that an actor may have open: those of watchers wait, two or three of every process. What else waits is bounded
#: by the actors themselves. Ray's concurrency groups are no help: each has an event loop of its own.
MAX_CALLS = 20_000
#: An actor that restarts needs about this long.
RESTART_S = 2.0
#: A caller waits this long for an actor to be looked up, or made. The question goes on; nobody else asks it meanwhile.
LOOK_UP_TIMEOUT_S = 5.0


async def unwrapped(call: Awaitable[T]) -> T:
    """The result of a remote call; the callee's own exception if it raised one."""
    try:
        return await call
    except RayTaskError as error:
        raise _own(error) from None


async def get_object(put: Awaitable[T]) -> T:
    """What an actor put into the object store. Raises ActorUnavailable if it is lost: with its owner, or to eviction."""
    try:
        return await put
    except RayError as error:
        raise ActorUnavailable(f"an object is lost ({type(error).__name__})", retry_after_s=RESTART_S) from error


def _own(error: RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, Exception) else error


def exit_actor() -> None:
    """Called in an actor: it ends, for good."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class NamedActor:
    """A detached actor, by name. `kind` is a class, `args` what it is made with when it is not there; `resources` bind
    it to nodes that have them.

    Its name in Ray ends with the protocol's number: code that speaks another makes, or finds, an actor of its own.
    """

    def __init__(self, name: str, kind: type, *args: Any, resources: Mapping[str, float] | None = None) -> None:
        self._resources = dict(resources or {})
        self._name = f"{name}.v{PROTOCOL}"
        self._kind = kind
        self._args = args
        self._handle: Any = None
        self._looking: asyncio.Task[Any] | None = None
        self._tasks = Tasks()
        self._absence = UnavailableLog(self._name)

    def start(self) -> Any:
        """Have the actor made now if it is not there; nobody waits for it. Not for an event loop.

        `ray.get` of what this returns waits until it is there, and raises why it could not be made.
        """
        self._handle = self._look_up()
        return self._handle.__ray_ready__.remote()

    async def call(self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """Call a method of the actor's class, by its name. Raises ActorUnavailable while the actor is away."""
        try:
            answer = await self._answer(method, *args, **options)
        except ActorUnavailable as error:
            self._absence.met(error)
            raise
        except Exception:  # the actor's own
            self._absence.over()
            raise
        self._absence.over()
        return answer

    async def _answer(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **options: P.kwargs
    ) -> T:
        """Ray has a dozen errors for an actor that is away, by what died (it, its node, the raylet, its memory)."""
        try:
            answer: T = await getattr(await self._actor(), method.__name__).remote(*args, **options)
        except RayTaskError as error:
            raise _own(error) from None
        except RayError as error:
            if not isinstance(error, ActorUnavailableError):  # one that is out of reach is still the same actor
                self._handle = None  # it may have been removed on purpose: the next call looks it up again
            reason = f"{self._name} does not answer ({type(error).__name__}); ask again"
            raise ActorUnavailable(reason, retry_after_s=RESTART_S) from error
        return answer

    async def _actor(self) -> Any:
        """The actor's handle. One question at a time, however many wait for its answer."""
        if self._handle is not None:
            return self._handle
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.start(asyncio.to_thread(self._find))
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                self._handle = await asyncio.shield(self._looking)
        except TimeoutError:
            reason = f"{self._name} was not found within {LOOK_UP_TIMEOUT_S:g} s: Ray's head node may be down"
            raise ActorUnavailable(f"{reason}; ask again", retry_after_s=RESTART_S) from None
        return self._handle

    def _find(self) -> Any:
        try:
            return self._look_up()
        except Exception as error:  # Ray has as many errors for this as ways to fail
            reason = f"{self._name} cannot be found ({type(error).__name__}: {error}); ask again"
            raise ActorUnavailable(reason, retry_after_s=RESTART_S) from error

    def _look_up(self) -> Any:
        """Blocks, for up to a minute if Ray's head node does not answer."""
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
    """A named actor that others make: while there is none it is away."""

    def __init__(self, name: str) -> None:
        super().__init__(name, type(None))

    def _look_up(self) -> Any:
        return ray.get_actor(self._name, namespace=NAMESPACE)
