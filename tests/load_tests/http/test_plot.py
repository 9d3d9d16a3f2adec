"""The picture of a run, whatever its tenants and its title are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from load_tests.http.client import Outcome
from load_tests.http.plot import MOST_TENANTS, plot


def outcomes(tenants: list[str]) -> list[Outcome]:
    return [
        Outcome(i, "m", name, 0.1 * i, 0.1 * i, [i + 0.5, i + 1.0], i + 1.0, 3, 2) for i, name in enumerate(tenants)
    ]


@pytest.fixture
def over_time(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The first panel of every figure that was saved."""
    drawn: list[Axes] = []
    save = Figure.savefig

    def saved(figure: Figure, path: Path, **settings: object) -> None:
        save(figure, path, **settings)
        drawn.append(figure.axes[0])

    monkeypatch.setattr(Figure, "savefig", saved)
    return drawn


def test_names_are_not_read_as_mathematics(tmp_path: Path, over_time: list[Axes]) -> None:
    names = ["$\\foo$", "a_$x", "_x", "tenant-0"]
    plot(outcomes(names), "$\\frac$ and $", tmp_path / "x.png")
    legend = over_time[0].get_legend()
    assert legend is not None
    assert sorted(text.get_text().replace("\\$", "$").strip() for text in legend.get_texts()) == sorted(names)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
def test_many_tenants_leave_room_for_the_axes(tmp_path: Path, over_time: list[Axes]) -> None:
    plot(outcomes([f"tenant-{i}" for i in range(MOST_TENANTS)]), "few", tmp_path / "few.png")
    plot(outcomes([f"tenant-{i}" for i in range(300)]), "many", tmp_path / "many.png")
    few, many = over_time
    assert few.get_legend() is not None
    assert many.get_legend() is None
    assert len(many.lines) == 300
    assert many.get_position().height > 0.3


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([Outcome(0, "m", "t", 0.0, 0.0, done_s=1.0, error="no")], "x", tmp_path / "x.png")
