"""`polylora serve`: `serve run` for people: one command, a few lines of output, a URL at the end.

In: a Serve application file and perhaps another host and port. Out: a running service until a signal, and
an exit status. Everything that can be checked is checked before anything starts: the file, the port, the
model. The service is the one that `serve run` with the same file starts, with Ray's switches set
(`ray_switches`) and without its dashboard unless it is asked for. What can start side by side does: the
store and placement beside Serve's controller, proxies beside the deployments.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.cli.keys import OPEN_NOTICE, check_open_door, is_open
from app.cli.ray_switches import HA_PROXY_PORTS, set_ray_switches
from app.cli.room import OWN_CLUSTER_LIMIT_S, Actor, RoomWatch, no_room
from app.cli.settings_file import IMPORT_PATH, read_settings
from app.config import AppConfig
from app.engine.errors import ConfigError, EngineFailure

#: A first start compiles kernels for most of a minute; a large model takes its time to load.
START_TIMEOUT_S = 900.0


def serve_until_stopped(config_path: Path, host: str | None, port: int | None, *, dashboard: bool) -> int:
    """Run the service in the foreground. Raises PolyloraError when it cannot start."""
    settings = read_settings(config_path)
    if not os.environ.get("RAY_ADDRESS"):  # another cluster has environments of its own
        settings.engine.check_installed()
    document = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    host, port = _address(document, host, port)
    url = f"http://{_reachable(host)}:{port}"
    _check_port(host, port, "choose another --port")
    check_open_door(settings, host, os.environ)
    if not set_ray_switches():
        _say("HAProxy is not used; Serve's own proxy costs more CPU per token")
    elif not os.environ.get("RAY_ADDRESS"):
        _check_ha_proxy_ports()
    started_s = time.monotonic()
    _say("starting Ray")
    _start_ray(dashboard)
    with _stop_on_signals():
        app_names: Sequence[str] = ()
        try:
            _say("starting the service")
            app_names = _deploy(document, settings)
            _say("loading the model (the first start on a machine also compiles kernels: about a minute)")
            _wait_until_ready(app_names, _health_url(document, url))
            adapters = [adapter.name for adapter in settings.adapters.preload]
            print(_greeting(url, settings.model.name, adapters, time.monotonic() - started_s), flush=True)
            if settings.http.auth == "auto" and is_open(url):
                _say(OPEN_NOTICE)
            _wait_for_signal()
            _say("stopping when running requests have ended; ctrl-C again to end them now")
            _drain(app_names)
            return 0
        except KeyboardInterrupt:
            _say("stopping")
            return 0
        finally:
            _stop(app_names)


def _address(document: dict[str, Any], host: str | None, port: int | None) -> tuple[str, int]:
    """Where to listen: as asked for, else as the file says. Written into the file's content, for Serve."""
    options = document.get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"http_options is {options!r}; it has a host and a port, see configs/serve.yaml")
    host = host or options.get("host") or "127.0.0.1"
    if not isinstance(host, str):
        raise ConfigError(f"http_options.host is {host!r}; it is a name or an address, in quotes if need be")
    if port is None:
        port = options.get("port", 8000)
    if type(port) is not int or not 1 <= port <= 65_535:
        raise ConfigError(f"port {port!r} (--port, or http_options.port) is not a whole number from 1 to 65535")
    document["http_options"] = options | {"host": host, "port": port}
    return host, port


def _start_ray(dashboard: bool) -> None:
    """Start Ray, or join RAY_ADDRESS. The working directory can be imported from in every process."""
    import ray

    quiet: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": logging.ERROR}
    python_path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet, runtime_env={"env_vars": {"PYTHONPATH": python_path}})
        return
    # Inherited: workers that Ray starts ahead have no runtime environment, and only such can be used then.
    os.environ["PYTHONPATH"] = python_path
    ray.init(**quiet, include_dashboard=dashboard)


def _deploy(document: dict[str, Any], settings: AppConfig) -> Sequence[str]:
    """What `serve run` does with a file, without waiting for one part before starting the next.

    Returns the applications' names.
    """
    from ray.serve.schema import ServeDeploySchema

    from app.deployments.links import ray_private
    from app.deployments.placement.actor import placement_actor
    from app.deployments.store.actor import store_actor

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    schema = ServeDeploySchema.model_validate(document)
    is_joined = bool(os.environ.get("RAY_ADDRESS"))
    if not is_joined:
        ours = next(application.name for application in schema.applications if application.import_path == IMPORT_PATH)
        for actor in (store_actor(settings), placement_actor(settings, ours)):
            actor.start()
    ray_private.deploy(ray_private.start_serve(schema, wait_for_proxies=is_joined), schema)
    return [application.name for application in schema.applications]


def _health_url(document: dict[str, Any], url: str) -> str | None:
    """Where our application says that it is ready; None if the file keeps it from HTTP."""
    ours = next(item for item in document["applications"] if item.get("import_path") == IMPORT_PATH)
    prefix = ours.get("route_prefix", "/")
    if prefix is None or document.get("proxy_location") == "Disabled":
        return None
    return f"{url}{prefix.rstrip('/')}/health"


def _wait_until_ready(app_names: Sequence[str], health_url: str | None) -> None:
    """Return when every application runs and ours answers. Raises EngineFailure with Serve's words when one cannot."""
    import ray
    from ray import serve

    deadline_s = time.monotonic() + START_TIMEOUT_S
    room = RoomWatch(_say, START_TIMEOUT_S if os.environ.get("RAY_ADDRESS") else OWN_CLUSTER_LIMIT_S)
    next_look_s = 0.0
    while True:
        applications = serve.status().applications
        states = [applications[name] for name in app_names if name in applications]
        for state in states:
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise EngineFailure(f"the service does not start: {_last_words(state)}")
        is_running = len(states) == len(app_names) and all(state.status == "RUNNING" for state in states)
        if is_running and (health_url is None or _answers(health_url)):
            return
        if time.monotonic() > next_look_s:
            room.look(_without_room(app_names))
            next_look_s = time.monotonic() + 1.0
        if time.monotonic() > deadline_s:
            logs = ray.get_runtime_context().get_session_name()
            raise EngineFailure(f"not ready after {START_TIMEOUT_S:g} s; the logs are in Ray's session {logs}")
        time.sleep(0.1)


def _without_room(app_names: Sequence[str]) -> str | None:
    """Which replicas fit on no machine of the cluster, as a sentence."""
    import ray

    from app.deployments.links.ray_private import actor_places

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    machines = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    actors = [Actor(place.name, place.resources, place.node_id or None) for place in actor_places()]
    return no_room(machines, actors, app_names)


def _answers(health_url: str) -> bool:
    """The way a client comes: an application may run before the proxies know of it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(health_url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _wait_for_signal() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _drain(app_names: Sequence[str]) -> None:
    """Take no more requests and return when those that run have ended, or Serve's patience with them."""
    import ray
    from ray import serve

    for name in app_names:
        while True:
            try:
                serve.delete(name)
            except TimeoutError:  # Serve's function waits for a minute, its replicas longer
                continue
            except ray.exceptions.RayError:  # nothing is left to drain
                pass
            break


def _last_words(state: Any) -> str:
    messages = [deployment.message for deployment in state.deployments.values() if deployment.message]
    return "\n".join([state.message, *messages]).strip()


def _stop(app_names: Sequence[str]) -> None:
    """Remove our applications; a Ray that was started here ends with this process."""
    import ray
    from ray import serve

    from app.deployments.links import ray_private

    if not ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        for name in app_names:
            serve.delete(name)
    else:
        ray_private.end_serve()
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def _check_ha_proxy_ports() -> None:
    """Two services on one machine may have all else in common: HAProxy would be started again and again."""
    for name, what in HA_PROXY_PORTS:
        if name in os.environ:
            _check_port("127.0.0.1", int(os.environ[name]), f"{what} would be there; set {name} to another")


def _check_port(host: str, port: int, way_out: str) -> None:
    """Fail early and in words: Serve would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); {way_out}") from error


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM ends the service as ctrl-C does; a second signal does not wait for running streams.

    Entered after Ray was started: Ray sets handlers of its own.
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


def _greeting(url: str, base_name: str, adapters: Sequence[str], seconds: float) -> str:
    models = ", ".join([base_name, *adapters])
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": base_name, "messages": [message], "max_tokens": 40})
    return (
        f"\nReady after {seconds:.0f} s: {url}\n  models: {models}\n\nTry it:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
        "ctrl-C stops it."
    )


def _say(text: str) -> None:
    print(f"polylora: {text}", file=sys.stderr, flush=True)
