"""All uses of Ray's private interfaces.

No other module uses an underscored name of Ray. Ray's version is pinned, and
`tests/deployments/rpc/test_ray_private.py` fails when another version has other names or signatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray._private import ray_constants, worker
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.state import state
from ray.core.generated import gcs_pb2
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private import api, replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve.config import gRPCOptions
from ray.serve.context import _check_cached_client_alive, _get_global_client, _set_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.engine.errors import ConfigError

#: The version this module was written for.
READ_VERSION = "2.60.0"
#: How long Serve's controller may take to stop everything.
SHUTDOWN_TIMEOUT_S = 30.0
#: Parts of a request's body (64 KiB and more each) that Serve reads ahead of the application, and how often it looks
#: whether the application has read one.
MAX_UNREAD_PARTS, UNREAD_PAUSE_S = 4, 0.005


def start_serve(schema: ServeDeploySchema, *, wait_for_proxies: bool) -> ServeControllerClient:
    """Start Serve in this process's cluster, as `serve run` does with a file.

    Without waiting, proxies start in parallel with the deployments; with it, an instance that already runs is joined.
    """
    options: dict[str, Any] = {
        "http_options": schema.http_options.model_dump(),
        "proxy_location": schema.proxy_location,
        "grpc_options": gRPCOptions(**schema.grpc_options.model_dump()),
    }
    if wait_for_proxies:
        return api.serve_start(**options, controller_options=schema.controller_options)
    controller, _ = api._create_controller_and_proxy_refs(
        **options,
        global_logging_config=None,
        global_tracing_config=None,
        controller_options=api._coerce_controller_options(schema.controller_options),
    )
    client = ServeControllerClient(controller)
    _set_global_client(client)  # type: ignore[no-untyped-call]
    return client


def deploy(client: ServeControllerClient, schema: ServeDeploySchema) -> None:
    """Start a file's applications, without waiting."""
    client.deploy_apps(schema, _blocking=False)


def end_serve() -> None:
    """Ask Serve's controller once to stop everything.

    `serve.shutdown` repeats the call, and Ray then logs the controller's death as an error.
    """
    client, _ = _check_cached_client_alive()
    if client is not None:
        shut_down = client._controller.graceful_shutdown.options(max_task_retries=0)
        with contextlib.suppress(RayActorError, GetTimeoutError):
            ray.get(shut_down.remote(), timeout=SHUTDOWN_TIMEOUT_S)


def ended_process() -> str | None:
    """The GCS or the raylet of a Ray that was started here, if it has ended: Serve then waits for it without end."""
    node: Any = worker._global_node
    for kind in (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET):
        if node is not None and any(each.process.poll() is not None for each in node.all_processes.get(kind, ())):
            return kind
    return None


def route_in_this_loop(handle: DeploymentHandle[Any]) -> None:
    """Run the handle's router in this event loop, which saves a hop between threads per frame.

    Call it before the handle is used; handles created later are Ray's default.
    """
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]


def redirect_error_messages(take: Callable[[Sequence[str]], None]) -> None:
    """Pass Ray's messages to this driver (dead workers and the like) to a function instead of printing them."""

    def redirect(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001
        take([str(line) for line in data["lines"]])

    worker.print_to_stdstream = redirect


def http_host() -> str:
    """The address that Serve's proxies listen on."""
    client = _get_global_client()
    assert client is not None, "called in a replica"
    return str(client.http_config.host)


def listen_on_loopback() -> None:
    """Make this replica's gRPC server listen on 127.0.0.1, as the whole cluster does, and not on all addresses.

    It changes nothing in a cluster that other machines reach.

    Call it in the deployment's constructor; the server starts afterwards.
    """
    if not is_open_to_network():

        def listen(server: Any, _: str) -> int:
            return int(add_port_to_grpc_server(server, "127.0.0.1:0"))  # type: ignore[no-untyped-call]

        replica.add_port_to_grpc_server = listen  # type: ignore[attr-defined]


def check_ray_token() -> None:
    """Raises ConfigError in a cluster that other machines may reach and that runs whatever they send it."""
    if ray.is_initialized() and is_open_to_network() and not is_token_auth_enabled():
        raise ConfigError(
            "this Ray cluster has no token authentication: whoever reaches its ports runs code here. Set "
            "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on every node before `ray start`, or "
            "http.require_ray_token: false if a firewall keeps everyone else out"
        )


def is_open_to_network() -> bool:
    """Whether Ray's ports of this machine are on an address that other machines may reach."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return not ipaddress.ip_address(address).is_loopback


def is_replica_draining() -> bool:
    """Whether Serve is draining the replica that runs in this process. False in any other process."""
    replica = worker.global_worker.actors.get(worker.global_worker.actor_id)
    return replica is not None and bool(replica._replica_impl._shutting_down)


class ActorLocation(NamedTuple):
    """A live or pending actor; `node_id` is None until it has a process."""

    name: str
    resources: Mapping[str, float]
    node_id: str | None


def actor_locations() -> list[ActorLocation]:
    """All actors of this process's cluster, from its GCS. No dashboard is needed."""
    table = state._connect_and_get_accessor().get_actor_table(None, None)
    rows = [gcs_pb2.ActorTableData.FromString(row) for row in table]  # type: ignore[attr-defined]
    return [
        ActorLocation(
            row.name or row.class_name,
            dict(row.required_resources),
            row.address.node_id.hex() if row.address.worker_id else None,
        )
        for row in rows
        if row.state != gcs_pb2.ActorTableData.DEAD  # type: ignore[attr-defined]
    ]


class AsgiIngress:
    """Base of a class under `@serve.ingress()`, whose ASGI application is made inside the replica."""

    def make_asgi_app(self) -> ASGIApp:
        """The application; called once, after the constructor."""
        raise NotImplementedError

    def __serve_build_asgi_app__(self) -> ASGIApp:
        _bound_received_bodies()
        app = self.make_asgi_app()

        async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
            # A plain function, because uvicorn mistakes a bound method for an ASGI 2 application.
            await app(scope, receive, send)

        return asgi


def _bound_received_bodies() -> None:
    """In this process, keep Serve from reading a whole body ahead of the application, into memory without bound.

    Serve reads on to notice that a client has disconnected. It notices it later while parts wait for the application.
    """
    make, take = ASGIDIReceiveProxy.__init__, ASGIDIReceiveProxy.__call__

    def init(self: Any, scope: Scope, receive: Receive, user_event_loop: asyncio.AbstractEventLoop) -> None:
        async def receive_when_read() -> Message:
            while self.num_unread >= MAX_UNREAD_PARTS:
                await asyncio.sleep(UNREAD_PAUSE_S)
            message = await receive()
            self.num_unread += 1
            return message

        self.num_unread = 0
        make(self, scope, receive_when_read, user_event_loop)

    async def call(self: Any) -> Message:
        message: Message = await take(self)
        self.num_unread -= 1
        return message

    ASGIDIReceiveProxy.__init__, ASGIDIReceiveProxy.__call__ = init, call  # type: ignore[method-assign]


class AcceptingReplica(RunningReplica):
    """A replica that rejects no call.

    Serve makes every call that a replica may reject a streaming one. Ray ends those on the replica's event loop, where
    it waits until the caller has all items: while a caller's node is cut off, the whole replica would stand still.
    """

    @property
    def is_cross_language(self) -> bool:
        """True, which has Serve's router send calls that cannot be rejected. Nothing else asks the wrapper for it."""
        return True


class ChoosingRouter(RequestRouter):
    """A router that chooses the replica of each request by that request alone.

    Ray's own routing task matches replicas to requests by a key that all calls of one parent request share, so
    concurrent calls would swap their replicas. This loop avoids that, as in Ray's capacity-queue router.
    """

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return AcceptingReplica(replica_info)

    @property
    def running(self) -> list[RunningReplica]:
        """Serve's list of replicas: running, not draining."""
        return list(self._replicas.values())

    def shortcut(self, request: PendingRequest, *, is_retry: bool) -> RunningReplica | None:  # noqa: ARG002
        """A replica that takes this request in any case; None to use `choose_replicas`."""
        return None

    def check_can_wait(self, request: PendingRequest) -> None:
        """Raise if this request must not wait for the first running replica."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if (replica := self.shortcut(pending_request, is_retry=is_retry)) is not None:
            return replica
        attempt = 0
        while True:
            while not self._replicas:
                self.check_can_wait(pending_request)
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            for candidates in await self.choose_replicas(self.running, pending_request):
                if len(candidates) == 1:  # its load changes nothing, and a slow network's answer may take long
                    self._record_queue_wait_time(pending_request)
                    return candidates[0]
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    self._record_queue_wait_time(pending_request)
                    return replica
            await self._backoff(attempt)
            attempt += 1
