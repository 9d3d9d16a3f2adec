"""Placement policies side by side, as an SVG file of six panels.

Each panel has a group of points per scenario, with the intervals as lines. The same numbers give the same bytes with
one release of matplotlib: no date is in it, names are made with a fixed salt, and text stays text. Imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from app.simulation.result import Interval

PANELS = {
    "hit_rate": "hit rate",
    "loads_per_1000": "loads per 1,000 requests",
    "route_changes": "churn: route changes",
    "imbalance": "imbalance: busiest replica / mean",
    "ttft_p99_s": "time to first token, p99, s",
    "jain": "Jain's index over tenants",
}
#: Markers as well as colours tell policies apart.
MARKERS = "osD^vPX*"
#: Part of a scenario's place that its points take.
GROUP_WIDTH = 0.8


def plot_policies(found: Mapping[str, Mapping[str, Mapping[str, Interval]]], path: Path) -> None:
    """`found`: scenario -> policy -> number -> interval, the same policies in each. Jain's index is 1 for one tenant.

    ValueError for no scenario. A number that some run had not (NaN) has no point.
    """
    if not found:
        raise ValueError("no scenario was simulated; there is nothing to plot")
    scenarios = list(found)
    policies = list(found[scenarios[0]])
    with mpl.rc_context({"svg.hashsalt": "polylora", "svg.fonttype": "none", "font.size": 9.0}):
        figure = Figure(figsize=(11.0, 9.0), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
            for index, policy in enumerate(policies):
                away = GROUP_WIDTH * ((index + 0.5) / len(policies) - 0.5)
                values = [found[scenario][policy][key] for scenario in scenarios]
                axes.errorbar(
                    [place + away for place in range(len(scenarios))],
                    [value.mean for value in values],
                    yerr=[value.plus_minus for value in values],
                    fmt=MARKERS[index % len(MARKERS)],
                    markersize=4.0,
                    elinewidth=1.0,
                    label=policy,
                )
            axes.set_title(title)
            axes.set_xticks(range(len(scenarios)), scenarios)
            axes.set_xlim(-0.5, len(scenarios) - 0.5)
            axes.grid(axis="y", alpha=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(policies), 7))
        figure.savefig(path, format="svg", metadata={"Date": None})
