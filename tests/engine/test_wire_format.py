"""What goes to other processes comes back equal."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from app.engine.models.spec import LayerSpec, MlpSpec, StoredModule
from app.engine.wire_format import from_plain, to_plain
from tests.engine.batch_invariance import dense_spec, latent_spec, mixture_spec, sinks_spec


class Inner(NamedTuple):
    number: int


class Outer(NamedTuple):
    inner: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    "value",
    [
        Outer(),
        Outer((Inner(1), Inner(2), Inner(1))),
        dense_spec(),
        latent_spec(),
        mixture_spec(),
        sinks_spec(),
        LayerSpec(dense_spec().layers[0].attention, MlpSpec(8), stored=(StoredModule("o_proj", 4, 8),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_comes_back_equal_through_json(value: object) -> None:
    assert from_plain(type(value))(json.loads(json.dumps(to_plain(value)))) == value
