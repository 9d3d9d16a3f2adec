"""A placement policy is one file: it is found by its name or its path, and its options stand in it."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest

from app.config import PlacementConfig
from app.deployments.placement import policies
from app.deployments.placement.replica_choice import make_policy
from app.engine.errors import ConfigError
from app.main import build

NAMES = [module.name for module in pkgutil.iter_modules(policies.__path__)]

OWN = """
from pydantic import BaseModel

class Options(BaseModel):
    first: str

class Favourite:
    Options = Options
    has_affinity = True

    def __init__(self, options):
        self.first = options.first

    def assign(self, digest, fleet):
        return (self.first,)
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_folder_is_named_by_its_name(name: str) -> None:
    assert type(make_policy(PlacementConfig(policy=name))).__module__ == f"{policies.__name__}.{name}"


@pytest.mark.parametrize("separator", [".", ":"])
def test_a_policy_of_one_s_own_is_named_by_its_path(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_placement.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = PlacementConfig(policy=f"own_placement{separator}Favourite", policy_options={"first": "r7"})
    assert make_policy(config).assign("digest", None) == ("r7",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ({"policy": "stiky"}, "'stiky' is not one of least_loaded, min_cost_flow, rank_aware"),
        ({"policy": "no.such.Module"}, "cannot be imported"),
        ({"policy": "app.config.AppConfig"}, "is not a policy"),
        ({"policy_options": {"load_bound": 0.5}}, "load_bound: Input should be greater than or equal to 1"),
        ({"policy_options": {"bound": 2}}, "bound: Extra inputs are not permitted"),
        ({"policy": "least_loaded", "policy_options": {"load_bound": 2}}, "load_bound: Extra inputs"),
    ],
)
def test_a_policy_that_cannot_be_had_is_said_before_anything_loads(placement: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build({"placement": placement})
