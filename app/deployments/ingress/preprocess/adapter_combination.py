"""Several adapters in one request: the named adapters become one derived adapter.

The store makes the derived adapter; everything behind the ingress treats it like any other. Every part must be an
adapter that the caller may use, not the base model.
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

#: Name -> adapter; None for the base model. Raises NotFound.
ResolveName = Callable[[str], AdapterRef | None]


class CombinationBody(Body):
    """The method of a registered combination; all fields but `adapters` as in PEFT's `add_weighted_adapter`."""

    adapters: Items[WeightedAdapter] = Field(min_length=1, max_length=MAX_PARTS)
    method: Method = "cat"
    density: float | None = Field(default=None, ge=0, le=1)
    svd_rank: int | None = Field(default=None, ge=1, le=4096)
    majority_sign_method: MajoritySign | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _fields_fit_method(self) -> CombinationBody:
        try:
            _ = self.combination_method
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def combination_method(self) -> CombinationMethod:
        return CombinationMethod(self.method, self.density, self.svd_rank, self.majority_sign_method, self.seed)


def combination_of(
    adapters: Sequence[WeightedAdapter], resolve: ResolveName, method: CombinationMethod | None = None
) -> Combination:
    """The weighted sum of these adapters, or their combination by `method`. Raises InvalidRequest, NotFound."""
    parts = []
    for one in adapters:
        ref = resolve(one.name)
        if ref is None:
            raise InvalidRequest(
                f"{one.name[:80]!r} is the base model, which cannot be combined; name adapters", param="adapters"
            )
        parts.append(CombinationPart(ref, one.weight))
    return make_combination(parts, method or CombinationMethod())
