"""The rules and every board's expressions are accepted by Prometheus itself, where it is installed (`apt install
prometheus`), and rules name metrics that are exported.

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
