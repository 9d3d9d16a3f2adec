"""Prometheus metrics of all processes on all nodes, read from Ray's metrics agents.

Every process sends its metrics to the agent of its node, which offers them on a port that Ray chooses.
"""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.engine.errors import NotReady

#: What Ray puts before the names of our metrics.
PREFIX = "ray_polylora_"
#: 1 or 0 for each node: whether its agent answered.
UP = "ray_metrics_agent_up"
#: An agent may take this long for each part of its answer, and all agents together.
AGENT_TIMEOUT_S, TIMEOUT_S = 3.0, 8.0
MAX_THREADS = 4


class MetricsAgents:
    """One event loop. `nodes` gives Ray's table of nodes; it may block."""

    def __init__(self, nodes: Callable[[], Iterable[Mapping[str, Any]]] = ray.nodes) -> None:
        self._nodes = nodes
        self._threads = ThreadPoolExecutor(MAX_THREADS, "metrics")
        self._reading: SingleFlight[str, str] = SingleFlight(Tasks())

    async def text(self) -> str:
        """Our metrics in Prometheus's text format. Callers at the same time share one reading.

        Raises NotReady if no agent answers. Of one that does not, `ray_metrics_agent_up` is 0.
        """
        return await asyncio.shield(self._reading.task("metrics", self._read))

    async def _read(self) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                agents = _addresses(await loop.run_in_executor(self._threads, self._nodes))
                pages = await asyncio.gather(*(loop.run_in_executor(self._threads, _page, each) for each in agents))
        except TimeoutError:
            raise NotReady(f"Ray's metrics agents did not answer within {TIMEOUT_S:g} s", retry_after_s=5) from None
        if not any(page is not None for page in pages):
            raise NotReady(
                "no metrics agent of Ray answers; Ray's log dashboard_agent.log may say why", retry_after_s=5
            )
        up = [f'{UP}{{node="{each}"}} {int(page is not None)}' for each, page in zip(agents, pages, strict=True)]
        about_up = [f"# HELP {UP} Whether the metrics agent of a node answered.", f"# TYPE {UP} gauge"]
        return "\n".join([*_merge([page for page in pages if page is not None]), *about_up, *up, ""])


def _addresses(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """host:port of the agents of living nodes."""
    found = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes if node["Alive"]]
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in found)


def _page(agent: str) -> str | None:
    """What an agent offers, or None if it does not answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{agent}/metrics", timeout=AGENT_TIMEOUT_S) as answer:
            text: bytes = answer.read()
            return text.decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return None


def _merge(pages: Sequence[str]) -> list[str]:
    """The lines of our metrics, each metric's together as the format demands, with one HELP and TYPE."""
    about: dict[str, list[str]] = {}  # by metric
    samples: dict[str, list[str]] = {}
    for page in pages:
        name, is_new = "", False
        for line in page.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "#":
                if rest.startswith("HELP "):
                    name = rest.split(" ", 2)[1]
                    is_new = name not in about
                if is_new and name.startswith(PREFIX):
                    about.setdefault(name, []).append(line)
            elif name.startswith(PREFIX):
                samples.setdefault(name, []).append(line)
    return [line for name, lines in samples.items() for line in (*about[name], *lines)]
