"""Base of response models, and the responses that many routes share.

A required field is in every answer. Routes build their answers as dictionaries and return them unvalidated, which is
faster; the tests validate every answer that they get against its model, and fail for a field that the model lacks.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeAlias, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

T = TypeVar("T")

#: Unix time.
Seconds: TypeAlias = Annotated[int, Field(description="Unix time in whole seconds.")]
#: A field that an answer may lack; it is never null.
Omittable: TypeAlias = Union[T, SkipJsonSchema[None]]  # noqa: UP007  (an alias with a type variable)


class ResponseModel(BaseModel):
    """A JSON object of an answer."""

    model_config = ConfigDict(protected_namespaces=())


class PageResponse(ResponseModel, Generic[T]):
    """Part of a list; `last_id` is what `after` of the next page is."""

    object: Literal["list"]
    data: list[T]
    first_id: str | int | None
    last_id: str | int | None
    has_more: bool


class DeletedResponse(ResponseModel):
    """What is gone."""

    object: str
    id: str
    deleted: Literal[True]


class ErrorDetail(ResponseModel):
    """`param` names the field or the query's name that is wrong."""

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
