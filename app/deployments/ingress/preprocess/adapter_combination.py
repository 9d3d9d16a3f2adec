"""Several adapters in one request: the names that a client lists become one derived adapter.

In: names with weights, and a method. Out: a `Combination`, whose adapter the store makes and everything behind the
ingress takes for one like any other. Rule: every part is an adapter that the caller may use; the base is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import Field, model_validator

from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.ingress.schemas.request_model import Body, Items
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import (
    MAX_PARTS,
    Combination,
    CombinationMethod,
    CombinationPart,
    MajoritySign,
    Method,
    make_combination,
)
from app.engine.errors import InvalidRequest

#: A name's adapter; None for the base. Raises NotFound.
Find = Callable[[str], AdapterRef | None]


class ComposeBody(Body):
    """What a registered composition is made of; the fields beside `adapters` as in PEFT's `add_weighted_adapter`."""

    adapters: Items[WeightedAdapter] = Field(min_length=1, max_length=MAX_PARTS)
    method: Method = "cat"
    density: float | None = Field(default=None, ge=0, le=1)
    svd_rank: int | None = Field(default=None, ge=1, le=4096)
    majority_sign_method: MajoritySign | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _method_takes_them(self) -> ComposeBody:
        try:
            _ = self.recipe
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def recipe(self) -> CombinationMethod:
        return CombinationMethod(self.method, self.density, self.svd_rank, self.majority_sign_method, self.seed)


def combined(adapters: Sequence[WeightedAdapter], find: Find, recipe: CombinationMethod | None = None) -> Combination:
    """The weighted sum of these adapters, or what the recipe makes of them. Raises InvalidRequest, NotFound."""
    parts = []
    for one in adapters:
        ref = find(one.name)
        if ref is None:
            raise InvalidRequest(f"{one.name[:80]!r} is the base, which has no weight; name adapters", param="adapters")
        parts.append(CombinationPart(ref, one.weight))
    return make_combination(parts, recipe or CombinationMethod())
