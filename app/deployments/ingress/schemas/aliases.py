"""Bodies of /v1/aliases."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.deployments.ingress.schemas.request_model import Body
from app.deployments.ingress.schemas.response_model import ResponseModel, Seconds


class AliasBody(Body):
    """Targets and their weights: {"sql-v1": 95, "sql-v2": 5}."""

    targets: dict[str, float]


class PromoteBody(Body):
    target: str


class RollbackBody(Body):
    """Without a version, or without a body: the one before."""

    may_be_empty: ClassVar[bool] = True

    version: int | None = Field(default=None, ge=1, lt=2**31)


class Alias(ResponseModel):
    """`targets`: weights of adapters, by name."""

    id: str
    object: Literal["alias"]
    targets: dict[str, float]
    version: int
    previous_version: int | None
    updated: Seconds


class AliasVersionResponse(ResponseModel):
    id: int
    object: Literal["alias.version"]
    targets: dict[str, float]
    is_in_force: bool
