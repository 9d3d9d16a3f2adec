"""The picture of policies side by side: all of them are in it, and the same run gives the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.simulation.result import Interval
from load_tests.simulate import __main__ as program
from load_tests.simulate.plot import PANELS, plot_policies
from load_tests.simulate.scenarios import shared_prefixes

POLICIES = ("sticky", "least_loaded")


def test_the_command_draws_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "POLICIES", POLICIES)
    monkeypatch.setitem(program.SCENARIOS, "poisson", lambda rng: shared_prefixes(rng, 2, 5.0, num_ticks=3))
    drawn = []
    for name in ("one.svg", "two.svg"):
        path = tmp_path / name
        program.main(["policies", "--scenario", "poisson", "--seeds", "2", "--plot", str(path)])
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    words = set(ElementTree.fromstring(drawn[0]).itertext())
    assert {"poisson", *POLICIES, *PANELS.values()} <= words


def test_points_are_where_their_numbers_are(tmp_path: Path) -> None:
    def found(mean: float) -> dict[str, dict[str, dict[str, Interval]]]:
        return {"s": {policy: dict.fromkeys(PANELS, Interval(mean, 0.5)) for policy in POLICIES}}

    paths = [tmp_path / f"{mean}.svg" for mean in (1.0, 2.0, math.nan)]
    for path, mean in zip(paths, (1.0, 2.0, math.nan), strict=True):
        plot_policies(found(mean), path)
    assert len({path.read_bytes() for path in paths}) == 3
    with pytest.raises(ValueError, match="no scenario"):
        plot_policies({}, tmp_path / "none.svg")
