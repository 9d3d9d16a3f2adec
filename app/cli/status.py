"""`polylora status`: replicas, tiers and recent failures of a running service.

Exits with 0 if it is ready. If the service does not answer over HTTP, because it is starting or stuck, Ray on this
machine is asked instead; Ray's token is found where Ray keeps it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli.api_client import ApiClient, ApiError, add_url_option
from app.cli.ray_env import ONE_MACHINE_SWITCHES, user_folder
from app.cli.startup import replica_counts
from app.engine.errors import PolyloraError
from app.redaction import escape_control_chars

_MIB = 1 << 20


def add_status(commands: Any) -> None:
    text = "show a running service: replicas, tiers, recent failures"
    parser = commands.add_parser("status", help=text, aliases=["ps"])
    add_url_option(parser)
    parser.add_argument("--json", action="store_true", help="print the service's answer as JSON")
    parser.set_defaults(run=_status)


def status_lines(status: Mapping[str, Any], url: str) -> list[str]:
    """The answer of GET /v1/status as text."""
    readiness = "ready" if status["is_ready"] else "not ready: no engine replica is usable"
    failures = status["failures"]
    return [
        f"{url}: {readiness}",
        f"polylora {status['version']}, {status['model']}, {status['num_adapters']} adapters",
        "",
        *table(
            ("engine replica", "engine", "running", "waiting", "KV blocks", "rank rows free", "adapters", "memory"),
            [_replica_row(replica) for replica in status["replicas"]],
        ),
        "",
        *_scaling_lines(status.get("scaling_decisions")),
        *table(
            ("tier", "adapters", "MiB", "hits", "misses", "evictions"),
            [_tier_row(name, counts) for name, counts in status["tiers"].items()],
        ),
        "",
        "recent failures:" if failures else "no recent failures",
        *(f"  {event_line(item)}" for item in failures),
    ]


def ray_lines(applications: Mapping[str, Any]) -> list[str]:
    """Serve's status of its applications as text."""
    lines = []
    for name, application in applications.items():
        lines.append(f"application {name}: {application.status.value} {application.message}".rstrip())
        for title, deployment in application.deployments.items():
            states = ", ".join(f"{number} {state}" for state, number in replica_counts(deployment).items())
            lines.append(f"  {title}: {deployment.status.value}, {states or 'no replicas'}")
            if deployment.message:
                lines.append(f"    {deployment.message}")
    return lines or ["Serve has no applications"]


def _status(arguments: argparse.Namespace) -> int:
    service = ApiClient(arguments.url)
    try:
        status = service.call("GET", "/v1/status")
    except ApiError as error:
        if error.answered:
            raise
        print(f"{error}\nasking Ray on this machine:")
        print("\n".join(ray_lines(_applications())))
        return 1
    print(json.dumps(status) if arguments.json else "\n".join(status_lines(status, arguments.url)))
    return 0 if status["is_ready"] else 1


def _applications() -> Mapping[str, Any]:
    """The applications of the Ray cluster on this machine. Raises PolyloraError if there is none."""
    if (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_TMPDIR", str(user_folder()))  # where `polylora serve` has its cluster's address
    if not os.environ.get("RAY_ADDRESS"):
        for name, value, _ in ONE_MACHINE_SWITCHES:  # which `polylora serve` sets: Ray listens on 127.0.0.1 only
            os.environ.setdefault(name, value)
    import ray
    from ray import serve

    try:
        ray.init("auto", namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        applications: Mapping[str, Any] = serve.status().applications
        return applications
    except Exception as error:  # Ray raises a dozen kinds
        message = str(error).strip().partition("\n")[0]
        raise PolyloraError(
            f"cannot reach a Ray cluster on this machine ({message}); is the service running?"
        ) from error
    finally:
        ray.shutdown()


def _scaling_lines(decisions: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The last autoscaling decision, if there was one."""
    if not decisions:
        return []
    last = decisions[0]
    change = f"{last['prev_num_replicas']} -> {last['target_num_replicas']}"
    need = f"{last['reason']} need {last['needed_replicas']:.2f}"
    return [f"last autoscaling decision: {_when(last['created'])}  {last['deployment']} {change}: {need}", ""]


def _replica_row(replica: Mapping[str, Any]) -> Sequence[str]:
    num_held = replica["num_blocks"] - replica["num_blocks_free"]
    return (
        str(replica["replica_id"]),
        str(replica.get("engine", "")),
        str(replica["num_running"]),
        str(replica["num_waiting"]),
        f"{num_held} of {replica['num_blocks']}",
        str(replica["num_rank_rows_free"]),
        str(replica["residents"]),
        f"{replica.get('memory_bytes', 0) / _MIB:.0f} MiB",
    )


def _tier_row(name: str, counts: Mapping[str, float]) -> Sequence[str]:
    numbers = [counts.get(key, 0) for key in ("hits", "misses", "evictions")]
    held_mib = counts.get("held_bytes", 0) / _MIB
    return (name, f"{counts.get('held_adapters', 0):g}", f"{held_mib:.1f}", *(f"{number:g}" for number in numbers))


def event_line(event: Mapping[str, Any]) -> str:
    """An event as one line of text, whatever its detail holds."""
    detail = event.get("detail") or ""
    detail = escape_control_chars(detail if isinstance(detail, str) else json.dumps(detail))
    return f"{_when(event['created'])}  {event['event']}  {event.get('name') or ''}  {detail}".rstrip()


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their contents, the first left-aligned."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
