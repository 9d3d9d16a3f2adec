"""The rules and every board's expressions are accepted by Prometheus itself, where it is installed (`apt install
prometheus`), and rules name metrics that are exported. `promtool` plays each alert's trouble, and less than it.

In: `configs/prometheus/*.yaml` and `configs/grafana/*.json`. Rule: an alert asks for our metrics or for a recorded one,
and says in words what to do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

from load_tests.service import free_port
from tests.test_dashboards import DASHBOARDS, ROOT, SERIES, expressions, names

RULES = sorted((ROOT / "configs" / "prometheus").glob("*.yaml"))
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt install prometheus")


def rules() -> list[dict[str, Any]]:
    """Every rule of every file."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def test_rules_ask_for_metrics_that_are_exported() -> None:
    for rule in rules():
        used = names(rule["expr"].replace("polylora:", "recorded:"))
        assert used <= SERIES.keys(), rule
        of_rules = {name for name in recorded() if name in rule["expr"]}
        assert used | of_rules, f"{rule} asks for nothing of ours"
        assert rule["expr"].count("polylora:") == sum(rule["expr"].count(name) for name in of_rules), rule


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["for"].endswith("m")
        assert set(rule["annotations"]) == {"summary", "description"}


@needs_prometheus
@pytest.mark.nightly
def test_prometheus_accepts_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", *map(str, RULES)], check=True)


#: Alert -> (series of a trouble, what the alert then says, its labels, series that must not raise it). Values are
#: written as promtool reads them, one a minute: `0+3x90` starts at 0 and gets 3 more 90 times.
ALERTS: dict[str, tuple[dict[str, str], str, dict[str, str], dict[str, str]]] = {
    "PolyloraFailingFast": (
        {'requests_total{status="5xx"}': "0+30x90", 'requests_total{status="2xx"}': "0+90x90"},
        "25% of requests fail",
        {},
        {'requests_total{status="5xx"}': "0x78 0+30x11", 'requests_total{status="2xx"}': "0+90x90"},  # six minutes long
    ),
    "PolyloraFailing": (
        {'requests_total{status="5xx"}': "0+5x90", 'requests_total{status="2xx"}': "0+95x90"},
        "5% of requests fail",
        {},
        {'requests_total{status="4xx"}': "0+50x90", 'requests_total{status="2xx"}': "0+95x90"},
    ),
    "PolyloraAbsent": ({}, "No ingress exports metrics", {}, {"registered_adapters": "0x90"}),
    "PolyloraSlowFirstToken": (
        {'time_to_first_token_seconds_bucket{le="10"}': "0x90"}
        | {f'time_to_first_token_seconds_bucket{{le="{le}"}}': "0+60x90" for le in ("20", "+Inf")},
        "The 99th percentile of the time to first token is 19.9s",
        {},
        {f'time_to_first_token_seconds_bucket{{le="{le}"}}': "0+60x90" for le in ("5", "10", "+Inf")},
    ),
    "PolyloraQueueing": (
        {'engine_requests{state="waiting"}': "12x90", 'engine_requests{state="running"}': "0x90"},
        "12 requests wait",
        {},
        {'engine_requests{state="waiting"}': "12x90", 'engine_requests{state="running"}': "6x90"},
    ),
    "PolyloraKvMemoryFull": (
        {'kv_blocks{state="free",instance="a"}': "1x90", 'kv_blocks{state="used",instance="a"}': "99x90"},
        "a has 1% of its KV blocks free",
        {"instance": "a"},
        {'kv_blocks{state="free",instance="a"}': "1x90", 'kv_blocks{state="used",instance="a"}': "49x90"},
    ),
    "PolyloraAdapterThrashing": (
        {
            'adapter_hits_total{tier="device"}': "0+40x90", 'adapter_misses_total{tier="device"}': "0+120x90",
            'adapter_evictions_total{tier="device"}': "0+120x90",
        },
        "Only 25% of requests find their adapter on the device",
        {},
        {  # each adapter once: they do not evict each other
            'adapter_hits_total{tier="device"}': "0+40x90", 'adapter_misses_total{tier="device"}': "0+120x90",
            'adapter_evictions_total{tier="device"}': "0+30x90",
        },
    ),
    "PolyloraEventLoopLate": (
        {'ingress_event_loop_lag_seconds_bucket{instance="a",le="0.25"}': "0x90"}
        | {f'ingress_event_loop_lag_seconds_bucket{{instance="a",le="{le}"}}': "0+60x90" for le in ("0.5", "+Inf")},
        "An ingress's event loop on a is 497.5ms late",
        {"instance": "a"},
        {f'ingress_event_loop_lag_seconds_bucket{{instance="a",le="{le}"}}': "0+60x90" for le in ("0.1", "+Inf")},
    ),
}  # fmt: skip


@needs_prometheus
@pytest.mark.nightly
def test_alerts_fire_in_their_trouble_and_not_in_less(tmp_path: Path) -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert ALERTS.keys() == alerts.keys()
    tests = []
    for name, (trouble, summary, labels, less) in ALERTS.items():
        rule = alerts[name]
        fired = {
            "exp_labels": rule["labels"] | labels,
            "exp_annotations": {"summary": summary, "description": rule["annotations"]["description"]},
        }
        for series, expected in ((trouble, [fired]), (less, [])):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": f"ray_polylora_{key}", "values": text} for key, text in series.items()],
                    "alert_rule_test": [{"eval_time": "85m", "alertname": name, "exp_alerts": expected}],
                }
            )
    file = tmp_path / "alerts.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [*map(str, RULES)], "evaluation_interval": "30s", "tests": tests}))
    subprocess.run(["promtool", "test", "rules", str(file)], check=True)


@needs_prometheus
@pytest.mark.nightly
def test_prometheus_evaluates_every_board(tmp_path: Path) -> None:
    with prometheus(tmp_path) as url:
        for board in DASHBOARDS:
            for expression, _ in expressions(board):
                answer = ask(url, expression.replace("$__rate_interval", "5m"))  # Grafana's own variable
                assert answer["status"] == "success", (board.stem, expression, answer)


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """A Prometheus with our rules and nothing to scrape; gives its URL."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"rule_files": [str(path) for path in RULES]}))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        until_s = time.monotonic() + 120
        while ask(f"http://{address}", "1").get("status") != "success":
            assert process.poll() is None, "Prometheus has ended"
            assert time.monotonic() < until_s, "Prometheus does not answer"
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def ask(url: str, expression: str) -> dict[str, Any]:
    """Prometheus' answer to a query; {} while it does not listen."""
    try:
        with urlopen(f"{url}/api/v1/query?query={quote(expression)}", timeout=30) as answer:
            body: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        body = {"status": error.code, "error": error.read().decode()}
    except URLError:
        body = {}
    return body
