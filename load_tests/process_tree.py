"""CPU time of a service's processes by role, from /proc (Linux).

The service's session id selects them. Ended processes are not counted: read it while the service runs, and take
differences.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

#: (text in a command line, role), the first match counts; `OTHER` if none does.
ROLES: tuple[tuple[str, str], ...] = (
    ("ServeReplica:polylora:EngineReplica", "engine"),
    ("ServeReplica:polylora:Ingress", "ingress"),
    ("AdapterStoreActor", "store"),
    ("PlacementActor", "placement"),
    ("bin/haproxy", "haproxy"),
    ("polylora-haproxy", "haproxy"),
    ("HAProxyManager", "proxies"),
    ("ProxyActor", "proxies"),
    ("ServeController", "controller"),
    ("gcs_server", "ray"),
    ("raylet/raylet", "ray"),
    ("DashboardAgent", "ray agents"),
    ("RuntimeEnvAgent", "ray agents"),
    ("log_monitor", "ray agents"),
    ("autoscaler", "ray agents"),
    ("ray-dashboard-", "dashboard"),
    ("dashboard", "ray agents"),
    ("ray::", "ray workers"),
)
OTHER = "polylora serve"


def session_processes(session_id: int) -> Iterator[int]:
    """Ids of all processes of a session that are alive."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) == session_id:
                yield int(entry.name)


def processes(*session_ids: int) -> Mapping[str, list[int]]:
    """Process ids by role, of all these sessions."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for pid in (pid for session_id in session_ids for pid in session_processes(session_id)):
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            if command:  # one that has ended and was not waited for has none
                found[role(command)].append(pid)
    return found


def cpu_seconds(session_id: int) -> Mapping[str, float]:
    """User and system time by role."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, pids in processes(session_id).items():
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):
                seconds[name] += process_seconds(pid)
    return seconds


def process_seconds(pid: int) -> float:
    """User and system time of one process. FileNotFoundError or ProcessLookupError where there is none."""
    # Fields 14 and 15, counted from behind the name, which may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def role(command: str) -> str:
    """What a process with this command line is for."""
    return next((name for word, name in ROLES if word in command), OTHER)
