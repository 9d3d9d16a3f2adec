"""Dashboards ask for metrics that are exported, by labels that they have, and the docs name every one.

In: `configs/grafana/*.json`, the table in docs/reference/metrics.md, and the calls in app/ that make metrics, read from
source. Rule: nothing is started; names are compared as Prometheus sees them, with Ray's prefix and suffixes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DASHBOARDS = sorted((ROOT / "configs" / "grafana").glob("*.json"))
PREFIX = "polylora_"
KINDS = {"Gauge": "gauge", "SteadyGauge": "gauge", "Counter": "counter", "Histogram": "histogram"}
#: What Prometheus appends, by kind.
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


class Metric(NamedTuple):
    kind: str
    labels: frozenset[str]


def _made_metrics() -> Iterator[tuple[str, Metric]]:
    """Every metric that a call in app/ makes. Names and labels are literals, or variables that are tuples of them."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        tree = ast.parse(path.read_text())
        literals = {
            target.id: ast.literal_eval(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and _is_literal(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).startswith(PREFIX):
                    given = [keyword.value for keyword in node.keywords if keyword.arg == "tag_keys"]
                    tags = (given or list(node.args[2:3]) or [ast.Tuple([], ast.Load())])[0]
                    keys = literals[tags.id] if isinstance(tags, ast.Name) else ast.literal_eval(tags)
                    yield str(name.value), Metric(KINDS[node.func.id], frozenset(keys))


def _is_literal(value: ast.Tuple) -> bool:
    return all(isinstance(item, ast.Constant) for item in value.elts)


METRICS = dict(_made_metrics())
#: By the name that Prometheus knows.
SERIES = {f"ray_{name}{suffix}": metric for name, metric in METRICS.items() for suffix in SUFFIXES[metric.kind]}


def expressions(dashboard: Path) -> Iterator[tuple[str, str]]:
    """(expression, legend) of every panel."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def names(expression: str) -> set[str]:
    return set(re.findall(r"[a-z_]*polylora_\w+", expression))


def problems(expression: str, legend: str = "") -> list[str]:
    """What is wrong with an expression, in words."""
    found = []
    known: set[str] = set()
    for name in names(expression):
        metric = SERIES.get(name)
        if metric is None:
            found.append(f"nothing exports {name}")
            continue
        labels = metric.labels | ({"le"} if name.endswith("_bucket") else set())
        known |= labels
        is_rate = re.search(rf"rate\({name}\b", expression) is not None
        if is_rate != (metric.kind != "gauge"):
            found.append(f"{name} is a {metric.kind}")
        for selector in re.findall(rf"{name}\{{([^}}]*)\}}", expression):
            found += [f"{name} has no {label}" for label in re.findall(r"(\w+)=", selector) if label not in labels]
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    found += [f"no metric here has {label}" for label in sorted(grouped - known)]
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    found += [f"the legend's {label} is not in the result" for label in sorted(shown - grouped)]
    if "polylora" not in expression:
        found.append("it asks for no metric of ours")
    return found


def test_metrics_are_found_in_the_source() -> None:
    """All of them: no other call takes such a name; and with their labels."""
    app = "".join(path.read_text() for path in (ROOT / "app").rglob("*.py"))
    assert METRICS.keys() == set(re.findall(r'\(\s*"(polylora_[a-z_]+)"', app))
    assert METRICS["polylora_requests"] == Metric("counter", frozenset({"route", "status", "kind"}))
    assert METRICS["polylora_adapter_bytes"] == Metric("gauge", frozenset({"tier"}))
    assert METRICS["polylora_adapter_load_seconds"] == Metric("histogram", frozenset({"tier"}))


@pytest.mark.parametrize(
    ("expression", "legend", "wrong"),
    [
        ("sum(rate(ray_polylora_requests[1m]))", "", "nothing exports ray_polylora_requests"),
        ("sum(rate(polylora_requests_total[1m]))", "", "nothing exports polylora_requests_total"),
        ("sum(rate(ray_polylora_kv_blocks[1m]))", "", "ray_polylora_kv_blocks is a gauge"),
        ("sum(ray_polylora_requests_total)", "", "ray_polylora_requests_total is a counter"),
        ('sum(ray_polylora_kv_blocks{tier="disk"})', "", "ray_polylora_kv_blocks has no tier"),
        ("sum by (tier) (ray_polylora_kv_blocks)", "", "no metric here has tier"),
        ("sum by (state) (ray_polylora_kv_blocks)", "{{tier}}", "the legend's tier is not in the result"),
        ("sum(ray_node_cpu)", "", "it asks for no metric of ours"),
    ],
)
def test_what_is_wrong_is_found(expression: str, legend: str, wrong: str) -> None:
    assert problems(expression, legend) == [wrong]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_ask_for_what_is_exported(dashboard: Path) -> None:
    asked = list(expressions(dashboard))
    assert asked
    for expression, legend in asked:
        assert problems(expression, legend) == [], expression


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {name for dashboard in DASHBOARDS for expression, _ in expressions(dashboard) for name in names(expression)}
    missing = [
        name for name, metric in METRICS.items() if not {f"ray_{name}{s}" for s in SUFFIXES[metric.kind]} & asked
    ]
    assert missing == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_can_be_imported_anywhere(dashboard: Path) -> None:
    whole: dict[str, Any] = json.loads(dashboard.read_text())
    assert whole["uid"] == f"polylora-{dashboard.stem}"
    source, *others = whole["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert {each["type"] for each in others} <= {"textbox"}
    panels = whole["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    for panel in panels:
        sources = {each["datasource"]["uid"] for each in (panel, *panel["targets"])}
        assert sources == {"${datasource}"}, "whoever imports it chooses the Prometheus"


def test_the_docs_name_every_metric_and_its_labels() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith(f"| `{PREFIX}")]
    documented = {name.strip(" `"): labels for name, _, labels, _ in rows}
    assert documented.keys() == METRICS.keys()
    for name, labels in documented.items():
        assert set(re.findall(r"`(\w+)`", labels)) == METRICS[name].labels, name


def test_the_docs_name_no_metric_that_is_none() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"`(?:ray_)?(polylora_\w+?)(?:_total|_bucket)?`", page.read_text()):
            assert name in METRICS, f"{page.name}: {name}"
