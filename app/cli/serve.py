"""`polylora serve`: `serve run` for people: one command, a few lines of output, a URL at the end.

The file, the port and the model are checked before anything starts. The service is the one that `serve run` starts with
the same file, with Ray's environment prepared (`ray_env`) and without Ray's dashboard by default. Independent parts
start at the same time: the store and placement with Serve's controller, proxies with the deployments.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.admin_key import OPEN_NOTICE, check_exposure, is_open, keep_digests
from app.cli.config_file import IMPORT_PATH, address_in, bases_of, read_document
from app.cli.haproxy_supervisor import SERVE_PID, end_haproxys
from app.cli.preflight import (
    check_device,
    check_folders,
    check_ha_proxy_ports,
    check_open_files,
    check_port,
    check_preloaded,
)
from app.cli.ray_env import HARD_STOP, ha_proxy_folder, set_ray_switches
from app.cli.startup import (
    ReplicaWatch,
    StartError,
    check_actors,
    check_ha_proxy,
    deployments_of,
    reason_in,
    wait_until_ready,
)
from app.config import HTTP_HOST, INGRESS_DRAIN_MARGIN_S, AppConfig
from app.deployments.placement.replica_choice import make_policy
from app.engine.errors import EngineFailure
from app.logging import LogEvent, start_log
from app.machine_memory import hidden_limit_bytes
from app.private_folder import UMASK

if TYPE_CHECKING:  # Ray is imported when its switches are set
    from ray.serve.schema import ServeDeploySchema

logger = logging.getLogger(__name__)

#: How often lost replicas are looked for; one that is back sooner goes unnoticed. Each look takes about 18 ms of CPU,
#: here and in Serve's controller, which engines on this machine could use.
LOOK_INTERVAL_S = 5.0
#: The part of the memory that Ray's object store has, by Ray's default.
OBJECT_STORE_SHARE = 0.3


def serve_until_stopped(
    config_path: Path, host: str | None, port: int | None, *, dashboard: bool, is_encoder: bool = False
) -> int:
    """Run the service in the foreground. Raises PolyloraError if it cannot. is_encoder: print the greeting of an
    embedder.
    """
    os.umask(UMASK)
    document = read_document(config_path)
    bases = bases_of(document, config_path)
    settings = bases[0]
    is_joined = bool(os.environ.get("RAY_ADDRESS"))
    if not is_joined:  # a joined cluster has its own environments
        for each in bases:
            check_device(each.engine)
    host, port = address_in(document, host, port)
    url = f"http://{_reachable(host)}:{port}"
    check_port(host, port, "choose another --port")
    check_folders(settings, os.environ)
    check_exposure(settings, host, os.environ)
    if not is_joined:
        for each in bases:
            check_preloaded(each)
            make_policy(each.placement)
    keep_digests(os.environ)  # before Ray starts: its processes inherit the environment
    longest_s = max(each.limits.request_timeout_s for each in bases) + INGRESS_DRAIN_MARGIN_S
    os.environ.setdefault(HARD_STOP, str(math.ceil(longest_s)))
    has_ha_proxy = set_ray_switches()
    if not has_ha_proxy:
        _say("HAProxy is not available; Serve's own proxy takes more CPU per token")
    elif not is_joined:
        check_ha_proxy_ports(os.environ)
        if fewer_connections := check_open_files(os.environ):
            _say(fewer_connections)
        os.environ[HTTP_HOST] = host
        document["http_options"]["host"] = "127.0.0.1"  # Serve's own; HAProxy alone listens on `host`
        os.environ[SERVE_PID] = str(os.getpid())
    schema = _schema(document, config_path)
    started_s = time.monotonic()
    _say(f"the log is {start_log(settings.logs, 'serve')}")
    _say("starting Ray")
    _start_ray(dashboard)
    _redirect_ray_errors()
    with _stop_on_signals():
        app_names = [application.name for application in schema.applications]
        folder = _own_ha_proxy_folder() if has_ha_proxy and not is_joined else None
        try:
            _say("starting the service")
            look = _deploy(schema, bases, folder)
            _say("loading the model (the first start on a machine also compiles kernels: about a minute)")
            wait_until_ready(app_names, _health_url(document, url), _say, look)
            models = [
                name
                for each in bases
                for name in (each.model.name, *(adapter.name for adapter in each.adapters.preload))
            ]
            needs_key = not is_open(url)
            seconds = time.monotonic() - started_s
            greeting = _greeting(url, models, seconds, needs_key=needs_key, is_encoder=is_encoder)
            print(greeting, flush=True)
            if settings.http.auth == "auto" and not needs_key:
                _say(OPEN_NOTICE)
            _wait_for_signal(app_names)
            _say("stopping when running requests have ended; press ctrl-C again to abort them")
            _drain(app_names)
            return 0
        except KeyboardInterrupt:
            _say("stopping")
            return 0
        finally:
            _stop(app_names)
            if folder is not None:
                end_haproxys(folder)
                shutil.rmtree(folder, ignore_errors=True)
            _say("stopped")


def _start_ray(dashboard: bool) -> None:
    """Start Ray, or join RAY_ADDRESS. Every process can import from the working directory."""
    import ray

    quiet: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": logging.ERROR}
    python_path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet, runtime_env={"env_vars": {"PYTHONPATH": python_path}})
        return
    # Inherited, because prestarted workers can only be used without a runtime environment.
    os.environ["PYTHONPATH"] = python_path
    if (limit := hidden_limit_bytes()) is not None:
        quiet["object_store_memory"] = int(OBJECT_STORE_SHARE * limit)
    for is_last in (False, True):
        try:
            context = ray.init(**quiet, include_dashboard=dashboard)
            break
        except Exception as error:  # Ray raises a dozen kinds
            # On a busy machine Ray's processes do not find each other within 15 s, which no setting of Ray changes.
            if is_last or "timed out" not in str(error):
                raise StartError(f"Ray does not start: {reason_in(str(error))}", str(error)) from error
            _say("Ray did not start in time; trying again")
            ray.shutdown()
    if dashboard:  # if 8265 is in use, Ray takes the next free port
        _say(f"Ray's dashboard is http://{context.dashboard_url}; `ray get-auth-token` prints its token")


def _redirect_ray_errors() -> None:
    """Log the messages that Ray would print here in colours; `ReplicaWatch` reports what they mean."""
    from app.deployments.rpc.ray_private import redirect_error_messages

    redirect_error_messages(lambda lines: logger.warning(LogEvent("Ray says", text=" ".join(lines))))


def _schema(document: dict[str, Any], path: Path) -> ServeDeploySchema:
    from app.cli.serve_schema import serve_schema

    return serve_schema(document, path)


def _deploy(schema: ServeDeploySchema, bases: Sequence[AppConfig], ha_proxy: Path | None) -> Callable[[], None]:
    """What `serve run` does with a file, without waiting for one part before starting the next.

    ha_proxy: the folder of this cluster's HAProxy, if there is one. Returns what to call while the start is waited for.
    """
    from app.deployments.placement.actor import placement_actor
    from app.deployments.rpc import ray_private
    from app.deployments.store.actor import store_actor

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    is_joined = bool(os.environ.get("RAY_ADDRESS"))
    made: list[tuple[str, Any]] = []
    if not is_joined:
        ours = next(application.name for application in schema.applications if application.import_path == IMPORT_PATH)
        for settings in bases:
            made.append(("the adapter store", store_actor(settings).start()))
            made.append(("placement", placement_actor(settings, ours).start()))
    ray_private.deploy(ray_private.start_serve(schema, wait_for_proxies=is_joined), schema)

    def look() -> None:
        check_actors(made)
        if ha_proxy is not None:
            check_ha_proxy(ha_proxy)

    return look


def _health_url(document: dict[str, Any], url: str) -> str | None:
    """The URL of our application's health check; None if the file does not expose it over HTTP."""
    ours = next(item for item in document["applications"] if item.get("import_path") == IMPORT_PATH)
    prefix = ours.get("route_prefix", "/")
    if prefix is None or document.get("proxy_location") == "Disabled":
        return None
    return f"{url}{prefix.rstrip('/')}/health"


def _own_ha_proxy_folder() -> Path:
    """The folder of HAProxy's files on this node, which is the whole cluster."""
    import ray

    return ha_proxy_folder() / ray.get_runtime_context().get_node_id()


def _wait_for_signal(app_names: Sequence[str]) -> None:
    from ray import serve

    watch = ReplicaWatch(_warn)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _check_ray()
            applications: Mapping[str, Any] = {}
            with contextlib.suppress(Exception):  # Serve's controller may be restarting, or Ray stopping
                applications = serve.status().applications
            watch.look(deployments_of([applications[name] for name in app_names if name in applications]))
            time.sleep(LOOK_INTERVAL_S)


def _check_ray() -> None:
    """Raises EngineFailure if Ray has ended, so that whatever runs this command can start it again."""
    from app.deployments.rpc import ray_private

    if (kind := ray_private.ended_process()) is not None:
        raise EngineFailure(f"Ray's {kind} has ended, and the service with it; start it again")


def _drain(app_names: Sequence[str]) -> None:
    """Accept no more requests; return when running ones have ended or Serve's timeout has passed."""
    import ray
    from ray import serve

    for name in app_names:
        while True:
            try:
                serve.delete(name)
            except TimeoutError:  # Serve's function waits for a minute, its replicas wait longer
                continue
            except ray.exceptions.RayError:  # nothing is left to drain
                pass
            break


def _stop(app_names: Sequence[str]) -> None:
    """Delete our applications; a Ray that was started here stops."""
    import ray
    from ray import serve

    from app.deployments.rpc import ray_private

    if not ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        for name in app_names:
            serve.delete(name)
    elif ray_private.ended_process() is None:
        ray_private.end_serve()
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM stops the service as ctrl-C does; a second signal does not wait for running streams.

    Entered after Ray has started, because Ray sets handlers of its own.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host


def _greeting(url: str, models: Sequence[str], seconds: float, *, needs_key: bool, is_encoder: bool) -> str:
    """`models`: base models and adapters; the first is a base model."""
    base_name = models[0]
    text = "What is the capital of France?"
    message = {"role": "user", "content": text}
    route, asked = "chat/completions", {"model": base_name, "messages": [message], "max_tokens": 40}
    if is_encoder:
        route, asked = "embeddings", {"model": base_name, "input": text}
    body = json.dumps(asked)
    header, how = "", "Try it"
    if needs_key:
        header, how = '-H "Authorization: Bearer $KEY" ', "Try it with a project's key (`polylora tenants create NAME`)"
    return (
        f"\nReady after {seconds:.0f} s: {url}\n  models: {', '.join(models)}\n\n{how}:\n\n"
        f"  curl {url}/v1/{route} {header}-H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
        "ctrl-C stops it."
    )


def _warn(text: str) -> None:
    """Log a message and print it."""
    logger.warning(text)
    _say(text)


def _say(text: str) -> None:
    print(f"polylora: {text}", file=sys.stderr, flush=True)
