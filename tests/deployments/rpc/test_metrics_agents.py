"""Metrics of all nodes as one page, from agents that answer in part."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.deployments.rpc import metrics_agents
from app.deployments.rpc.metrics_agents import MetricsAgents
from app.engine.errors import NotReady

PAGE = """\
# HELP ray_node_cpu_count CPUs
# TYPE ray_node_cpu_count gauge
ray_node_cpu_count{node="N"} 2.0
# HELP ray_polylora_requests_total Requests answered.
# TYPE ray_polylora_requests_total counter
ray_polylora_requests_total{WorkerId="N",route="chat"} 3.0
# HELP ray_polylora_request_seconds From arrival to the last token.
# TYPE ray_polylora_request_seconds histogram
ray_polylora_request_seconds_bucket{WorkerId="N",le="1.0"} 2.0
ray_polylora_request_seconds_bucket{WorkerId="N",le="+Inf"} 3.0
ray_polylora_request_seconds_count{WorkerId="N"} 3.0
ray_polylora_request_seconds_sum{WorkerId="N"} 4.5
"""


@contextmanager
def agent(answer: Callable[[], str | None]) -> Iterator[dict[str, Any]]:
    """A node whose agent answers so; None: 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer() if self.path == "/metrics" else None
            self.send_response(500 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: Any) -> None:
            """Nothing is written."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield node(server.server_port)
    server.shutdown()
    thread.join()
    server.server_close()


def node(port: int, *, is_alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": "127.0.0.1", "MetricsExportPort": port, "Alive": is_alive}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def test_metrics_of_all_nodes_are_one_page() -> None:
    with (
        agent(lambda: PAGE.replace('"N"', '"one"')) as one,
        agent(lambda: PAGE.replace('"N"', '"two"')) as two,
        agent(lambda: None) as broken,
    ):
        gone = node(free_port())
        text = await MetricsAgents(lambda: [one, two, broken, gone, node(1, is_alive=False)]).text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {*families} == {"ray_polylora_requests", "ray_polylora_request_seconds", "ray_metrics_agent_up"}
    requests = families["ray_polylora_requests"]
    assert (requests.type, requests.documentation) == ("counter", "Requests answered.")
    assert {(each.labels["WorkerId"], each.value) for each in requests.samples} == {("one", 3.0), ("two", 3.0)}
    assert len(families["ray_polylora_request_seconds"].samples) == 8
    up = {each.labels["node"]: each.value for each in families["ray_metrics_agent_up"].samples}
    ports = [each["MetricsExportPort"] for each in (one, two, broken, gone)]
    assert up == {f"127.0.0.1:{port}": float(index < 2) for index, port in enumerate(ports)}
    names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(names) == len(set(names))


async def test_without_any_answer_there_are_no_metrics() -> None:
    for nodes in ([], [node(free_port())]):
        with pytest.raises(NotReady, match="no metrics agent of Ray answers"):
            await MetricsAgents(lambda nodes=nodes: nodes).text()  # type: ignore[misc]


async def test_a_control_service_that_does_not_answer_holds_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = threading.Event(), []

    def nodes() -> list[dict[str, Any]]:
        calls.append(time.monotonic())
        answers.wait()
        return []

    monkeypatch.setattr(metrics_agents, "TIMEOUT_S", 1.0)
    agents = MetricsAgents(nodes)
    found = await asyncio.gather(*(agents.text() for _ in range(20)), return_exceptions=True)
    answers.set()
    assert all(isinstance(each, NotReady) and "did not answer within" in str(each) for each in found)
    assert len(calls) == 1
    monkeypatch.setattr(metrics_agents, "TIMEOUT_S", 60.0)
    with pytest.raises(NotReady, match="no metrics agent"):
        await agents.text()


def test_ipv6_addresses_are_in_brackets() -> None:
    table = [{"NodeManagerAddress": "::1", "MetricsExportPort": 8, "Alive": True}]
    assert metrics_agents._addresses(table) == ["[::1]:8"]
