"""A picture of a run as a PNG file: first tokens over time, the distributions, throughput.

Imports matplotlib, as only `load_tests.simulate.plot` does otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from load_tests.http.client import Outcome

#: Tenants that a legend names; one of hundreds leaves no room for the axes.
MOST_TENANTS = 10


def plot(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Four panels. ValueError when no request succeeded: there is nothing to draw."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        raise ValueError("no request succeeded; there is nothing to plot")
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(_plain(title))
    over_time, first, steady, rate = figure.subplots(2, 2).flat

    tenants = sorted({outcome.tenant for outcome in good})
    for tenant in tenants:
        own = [outcome for outcome in good if outcome.tenant == tenant]
        over_time.plot([o.due_s for o in own], [o.ttft_s for o in own], ".", label=_plain(tenant))
    over_time.set(xlabel="due, s", ylabel="first token after, s", title="first token over time")
    if len(tenants) <= MOST_TENANTS:
        over_time.legend(loc="upper left", fontsize="small")

    _cumulative(first, [o.ttft_s for o in good], "first token")
    _cumulative(first, [o.e2e_s for o in good], "end to end")
    first.set(xlabel="s", ylabel="share of requests", title="first token and whole answer")
    first.legend(fontsize="small")

    _cumulative(steady, [1000 * gap for o in good for gap in o.gaps_s], "between chunks")
    _cumulative(steady, [1000 * o.tpot_s for o in good if o.completion_tokens > 1], "per output token")
    steady.set(xlabel="ms", ylabel="share", title="while streaming")
    if steady.lines:
        steady.legend(fontsize="small")

    chunks = np.sort(np.concatenate([o.chunk_s for o in good]))
    seconds = np.arange(0, np.ceil(chunks[-1]) + 1)
    rate.stairs(np.histogram(chunks, seconds)[0], seconds)
    rate.set(xlabel="s", ylabel="chunks/s", title="throughput")
    figure.savefig(path, dpi=110)


def _plain(name: str) -> str:
    """Escape a name for matplotlib: text between $ is mathematics, and names that start with _ have no legend."""
    return " " * name.startswith("_") + name.replace("$", r"\$")


def _cumulative(axes: object, values: Sequence[float], label: str) -> None:
    if values:
        axes.ecdf(values, label=label)  # type: ignore[attr-defined]  # matplotlib's Axes
