"""The page of metrics, from the calls that make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs.generators.markdown import table

ROOT = Path(__file__).parents[2]

_KINDS = {"Gauge": "gauge", "SteadyGauge": "gauge", "Counter": "counter", "Histogram": "histogram"}
#: What a label's values are.
_LABELS = {
    "adapter": "the name of one of the 32 adapters with the most requests, or `other`",
    "application": "Ray Serve's name of the application",
    "deployment": "Ray Serve's name of the deployment",
    "digest": "the first 12 characters of an adapter's digest",
    "engine": "`cpu`, `cuda` or `xla`, or another program's name and version, such as `vllm 0.32.0`",
    "enforced": "`yes`, or `no` where a project's limits are only counted",
    "kind": "requests: `base` or `adapter`; tokens per second: `prompt`, `cached` or `completion`",
    "outcome": "requests: `ok` or `error`; draft tokens: `accepted` or `rejected`",
    "part": "of a step: `base`, `lora` or `adapter_load`; of a start: `load` or `warm_up`",
    "quantile": "`0.5` or `0.99`, within a fifth",
    "reason": "the limit that was reached (`requests`, `tokens`, `day`, `concurrent`, `spend`), or the scaling signal",
    "route": "the first part of the path behind `/v1`, or `handle` for Python callers",
    "state": "requests: `running` or `waiting`; KV blocks: `used`, `cached` or `free`; rank rows: `used` or `free`",
    "status": "`2xx` and so on; `499`: the client left",
    "tenant": "the id of one of the 32 tenants that were served most, or `other`",
    "tier": "`source`, `disk`, `host` or `device`",
}  # fmt: skip
_METRICS_INTRO = """`GET /metrics` on the service's own port is a page for Prometheus with the metrics of all
processes on all nodes. As long as there are no keys this machine reads it without one; otherwise it takes an admin
key, or the management token:

    scrape_configs:
      - job_name: polylora
        static_configs: [{targets: ["polylora.internal:8000"]}]
        authorization: {credentials_file: /etc/prometheus/polylora-admin-key}

Names have `ray_` before them, and a counter's `_total` after it. Processes send their numbers to Ray's agent on
their node every ten seconds. `ray_metrics_agent_up` is 0 for a node whose agent did not answer; if none does,
the answer is 503. Scrape either this page or the agents themselves, which have Ray's own metrics, too: with
`polylora serve` an agent listens on 127.0.0.1, on a port that Ray writes into
`/tmp/polylora-<user id>/ray/session_latest/metrics_export_port_*`, in a cluster of your own (`RAY_ADDRESS`) on
`ray start --metrics-export-port`.

`configs/grafana/` has dashboards (service, engines, adapters, tenants, objectives, canary): import each file in
Grafana and choose the Prometheus. `configs/prometheus/` has recording rules and alerts.

"""


def metrics_page() -> str:
    """Every metric that a call in app/ makes, then its labels."""
    found = sorted(set(_made_metrics()))
    labels = sorted({label for *_, keys in found for label in keys})
    rows = ((f"`{name}`", kind, ", ".join(f"`{key}`" for key in keys), says) for name, kind, says, keys in found)
    return (
        "# Metrics\n\n"
        + _METRICS_INTRO
        + table(("metric", "type", "labels", "description"), rows)
        + "\n## Labels\n\n"
        + table(("label", "values"), ((f"`{label}`", _LABELS[label]) for label in labels))
    )


def _made_metrics() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(name, type, description, labels). Names and descriptions are literals; labels may be a variable of literals."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        tree = ast.parse(path.read_text())
        tuples = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            is_metric = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _KINDS
            if not is_metric or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name, says = node.args[0].value, given.get("description") or node.args[1]
            tags = given.get("tag_keys") or (node.args[2] if len(node.args) > 2 else ast.Tuple([], ast.Load()))
            keys = ast.literal_eval(tuples[tags.id] if isinstance(tags, ast.Name) else tags)
            yield name, _KINDS[node.func.id], ast.literal_eval(says), tuple(keys)
