"""What `ray_private` uses of Ray is there, with the signatures that were read: an upgrade of Ray fails here first."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._common import tls_utils
from ray._private import services, worker
from ray._private.state import GlobalState
from ray.core.generated import gcs_pb2
from ray.serve import context
from ray.serve._private import api, replica, router
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.controller import ServeController
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter, RunningReplica
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from app.deployments.rpc import ray_private
from app.deployments.rpc.ray_private import (
    MAX_UNREAD_PARTS,
    READ_VERSION,
    AcceptingReplica,
    AsgiIngress,
    ChoosingRouter,
    ended_process,
    is_replica_draining,
    listen_on_loopback,
    redirect_error_messages,
)
from app.engine.errors import ConfigError
from app.main import build

ROOT = Path(__file__).parents[3]
START = ["http_options", "grpc_options", "global_logging_config", "global_tracing_config", "controller_options"]


def test_this_is_the_version_that_was_read() -> None:
    assert ray.__version__ == READ_VERSION
    assert f'"ray[serve]=={READ_VERSION}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (api.serve_start, [*START, "proxy_location", "kwargs"]),
        (api._create_controller_and_proxy_refs, [*START, "proxy_location", "kwargs"]),
        (api._coerce_controller_options, ["controller_options"]),
        (ServeControllerClient, ["controller"]),
        (ASGIDIReceiveProxy.__init__, ["self", "scope", "receive", "user_event_loop"]),
        (ASGIDIReceiveProxy.__call__, ["self"]),
        (ServeControllerClient.deploy_apps, ["self", "config", "_blocking"]),
        (context._set_global_client, ["client"]),
        (context._check_cached_client_alive, []),
        (context._get_global_client, ["raise_if_no_controller_running"]),
        (tls_utils.add_port_to_grpc_server, ["server", "address"]),
        (ServeController.graceful_shutdown, ["self", "wait"]),
        (DeploymentHandle._init, ["self", "kwargs"]),
        (GlobalState._connect_and_get_accessor, ["self"]),
        (worker.print_to_stdstream, ["data", "ignore_prefix"]),
        (RequestRouter._choose_replica_for_request, ["self", "pending_request", "is_retry"]),
        (RequestRouter._select_from_candidate_replicas, ["self", "candidates", "backoff_index"]),
        (RequestRouter._record_queue_wait_time, ["self", "pending_request"]),
        (RequestRouter._backoff, ["self", "attempt"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_what_is_called_has_the_parameters_that_were_read(function: Callable[..., Any], parameters: list[str]) -> None:
    # Ray adds `_ray_trace_ctx` to an actor class's methods when it starts the first such actor in a process.
    assert [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"] == parameters


def test_messages_of_errors_are_printed_by_the_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    taken: list[str] = []
    redirect_error_messages(taken.extend)
    worker.print_to_stdstream({"lines": ["a worker died"], "is_err": True}, True)
    assert taken == ["a worker died"]


def test_a_raylet_or_gcs_that_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "process" in services.ProcessInfo._fields
    running, ended = (SimpleNamespace(process=SimpleNamespace(poll=lambda code=code: code)) for code in (None, -9))
    for kind in ("raylet", "gcs_server"):
        started = {"raylet": [running], "gcs_server": [running], "log_monitor": [ended]}
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes=started))
        assert ended_process() is None, "the service does without the others"
        started[kind] = [ended]
        assert ended_process() == kind
    monkeypatch.setattr(worker, "_global_node", None)
    assert ended_process() is None, "in a cluster that was joined"


def test_actors_are_described_by_the_fields_that_are_read() -> None:
    fields = gcs_pb2.ActorTableData.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
    assert {"name", "class_name", "state", "required_resources", "address"} <= set(fields)
    assert {"node_id", "worker_id"} <= set(fields["address"].message_type.fields_by_name)


def test_the_loop_that_is_replaced_is_still_the_one_that_routes() -> None:
    assert isinstance(inspect.getattr_static(RequestRouter, "_replicas_updated_event"), property)
    assert "self._replicas:" in inspect.getsource(RequestRouter.__init__)
    assert "router._choose_replica_for_request(" in inspect.getsource(router), "this is how Serve asks"
    assert "_choose_replica_for_request" in vars(ChoosingRouter)


def test_serve_sends_no_call_as_one_that_may_be_rejected() -> None:
    """Such a call would be a streaming one, whose end holds the replica's event loop while its caller is cut off."""
    assert re.search(
        r"with_rejection = \(.*and not replica\.is_cross_language\s*\)", inspect.getsource(router), re.DOTALL
    )
    assert "._replica_info.is_cross_language" in inspect.getsource(RunningReplica.try_send_request)
    accepting = AcceptingReplica.__new__(AcceptingReplica)
    assert accepting.is_cross_language
    assert "AcceptingReplica" in inspect.getsource(ChoosingRouter.create_replica_wrapper)


def test_a_handle_can_be_told_where_its_router_runs() -> None:
    assert InitHandleOptions(_run_router_in_separate_loop=False)._run_router_in_separate_loop is False


def test_a_replica_notes_that_it_is_being_ended_before_it_drains() -> None:
    assert "self._replica_impl: Replica = " in inspect.getsource(replica.ReplicaActor)
    ending = inspect.getsource(replica.Replica._perform_graceful_shutdown)
    assert ending.index("self._shutting_down = True") < ending.index("drain")
    assert is_replica_draining() is False, "this process is no replica"


def test_serve_asks_an_ingress_for_its_application() -> None:
    assert "__serve_build_asgi_app__" in inspect.getsource(serve.ingress)
    assert "__serve_build_asgi_app__" in vars(AsgiIngress)


@pytest.mark.parametrize("is_same_loop", [True, False], ids=["one loop", "a loop of its own"])
async def test_serve_reads_a_little_of_a_body_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, is_same_loop: bool
) -> None:
    for name in ("__init__", "__call__"):
        monkeypatch.setattr(ASGIDIReceiveProxy, name, getattr(ASGIDIReceiveProxy, name))
    Ingress().__serve_build_asgi_app__()
    num_sent = 0

    async def receive() -> Message:
        nonlocal num_sent
        await asyncio.sleep(0)
        num_sent += 1
        return {"type": "http.request" if num_sent <= 40 else "http.disconnect", "body": bytes(1 << 16)}

    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    proxy = ASGIDIReceiveProxy({"type": "http"}, receive, asyncio.get_running_loop() if is_same_loop else other)
    reading = proxy.fetch_until_disconnect_task()
    await asyncio.sleep(0.2)
    assert num_sent <= MAX_UNREAD_PARTS + 2

    async def all_parts() -> int:
        number = 0
        while (await proxy())["type"] == "http.request":
            number += 1
        return number

    try:
        work = all_parts()
        if is_same_loop:
            assert await work == 40
        else:
            assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, other)) == 40
        await asyncio.wait_for(reading, 30)
    finally:
        other.call_soon_threadsafe(other.stop)
        thread.join()
        other.close()


class Ingress(AsgiIngress):
    def make_asgi_app(self) -> ASGIApp:
        return Response()


def test_no_other_module_uses_what_ray_keeps_to_itself() -> None:
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                inner = [name for name in names if name.startswith("_")]
                assert not inner or path.name == "ray_private.py", f"{path} imports {inner} of Ray"


@pytest.mark.parametrize(
    ("is_running", "address", "has_token", "is_accepted"),
    [
        (True, "10.0.0.7", False, False),
        (True, "10.0.0.7", True, True),
        (True, "127.0.0.1", False, True),
        (False, "10.0.0.7", False, True),
    ],
)
def test_a_cluster_that_runs_anybody_s_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_running: bool, address: str, has_token: bool, is_accepted: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: is_running)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    monkeypatch.setattr(ray_private, "is_token_auth_enabled", lambda: has_token)
    if is_accepted:
        build({})
    else:
        with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token .* http\.require_ray_token: false"):
            build({})
        build({"http": {"require_ray_token": False}})


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", "127.0.0.1:0"), ("10.0.0.7", "[::]:0")])
def test_a_replica_listens_where_its_cluster_does(monkeypatch: pytest.MonkeyPatch, address: str, expected: str) -> None:
    """Serve's server is made by the name that is replaced."""
    listened: list[str] = []

    def add_port(_: object, where: str) -> int:
        listened.append(where)
        return 1

    for module in (ray_private, replica):
        monkeypatch.setattr(module, "add_port_to_grpc_server", add_port)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    listen_on_loopback()
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica.Replica)
    replica.add_port_to_grpc_server(None, "[::]:0")
    assert listened == [expected]
