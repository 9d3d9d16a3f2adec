"""Base class of response models, and responses that many routes share.

Routes return dictionaries without validating them, which is faster; the tests validate every response against its
model and fail for a field that the model does not have.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeAlias, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

T = TypeVar("T")

Seconds: TypeAlias = Annotated[int, Field(description="Unix time in whole seconds.")]
#: A field that may be absent but is never null.
Omittable: TypeAlias = Union[T, SkipJsonSchema[None]]  # noqa: UP007  (an alias with a type variable)


class ResponseModel(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class PageResponse(ResponseModel, Generic[T]):
    """A page of a list; `last_id` is the `after` of the next page."""

    object: Literal["list"]
    data: list[T]
    first_id: str | int | None
    last_id: str | int | None
    has_more: bool


class DeletedResponse(ResponseModel):
    object: str
    id: str
    deleted: Literal[True]


class ErrorDetail(ResponseModel):
    """`param` names the invalid field or query parameter."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(ResponseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class MessagesErrorDetail(ResponseModel):
    type: str
    message: str


class MessagesErrorResponse(ResponseModel):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: MessagesErrorDetail
