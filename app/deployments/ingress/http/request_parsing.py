"""Parsing of requests: size-limited bodies, strict JSON, queries.

A route declares its body as `JsonBody[Model]` and its query as a `QueryParams`. FastAPI's own body parameters have no
size limit, accept duplicate keys, and do not suggest the right spelling of a field.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema
from starlette.convertors import PathConvertor
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from app.config import INFERENCE_PATHS
from app.deployments.ingress.error_responses import BodyTooLarge, ClientGone, InvalidJson, UnknownContentType
from app.deployments.ingress.json_parser import parse_json
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.schemas.request_model import Body, BodyT, parse_body
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest
from app.model_names import ROUTE_SUFFIXES
from app.suggestions import did_you_mean

#: Default and maximum number of entries of a page.
MAX_PAGE = 1000
#: Bytes of a body that a route does not use.
MAX_UNUSED_BYTES = 64 << 10
#: Bytes of a form beside its file, and of one of its fields.
FORM_BYTES, MAX_FIELD_BYTES = 2 << 20, 1 << 20
FORM_TYPE = "multipart/form-data"
_MAX_CHARS = 40


# -- bodies --


class _BodyReader:
    """Reads and checks the body of a `JsonBody` parameter."""

    def __init__(self, model: type[Body]) -> None:
        self.model = model

    async def read(self, request: Request) -> Body:
        """Raises what `read_bytes`, `parse_json` and `parse_body` raise. A long body is parsed in a thread."""
        if self.model.may_be_empty and _is_empty(request):
            return self.model()
        service: IngressService = request.app.state.service
        content = await read_bytes(request, service.preprocessor.limits.max_body_bytes)
        if not content:
            raise InvalidJson("the body is empty; send a JSON object")
        request.state.num_body_bytes = len(content)
        request.state.ignored = ignored = set[str]()
        return await in_worker_if_long(len(content), lambda: parse_body(self.model, parse_json(content), ignored))


if TYPE_CHECKING:
    JsonBody: TypeAlias = Annotated[BodyT, "the request's body"]
else:

    class JsonBody:
        """`JsonBody[Model]` annotates the parameter of a route that receives the parsed body."""

        def __class_getitem__(cls, model: type[Body]) -> Any:
            return Annotated[model, Depends(_BodyReader(model).read)]


def body_model(route: APIRoute) -> type[Body] | None:
    """The model of a route's JSON body, or None."""
    readers = (getattr(each.call, "__self__", None) for each in route.dependant.dependencies)
    return next((reader.model for reader in readers if isinstance(reader, _BodyReader)), None)


class NameConvertor(PathConvertor):
    """`{name:model}` in a route's path: a name of one or more parts, so that no suffix of a route is taken for a part.

    A `/` of a name may be written as %2F: servers decode paths before they are matched.
    """

    regex = rf"[^/]+(?:/(?!(?:{'|'.join(ROUTE_SUFFIXES)})$)[^/]+)*"


class DirectRoute(APIRoute):
    """A route called without FastAPI's resolution of dependencies if it takes the request and a `JsonBody` only.

    This saves 60 µs of 190 µs for `POST /detokenize`. The function must return a response. Included routers keep
    FastAPI's routes, because their own dependencies (access checks) are not known here.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        own, endpoint = self.dependant, self.endpoint
        if not all(map(_takes_request_only, (own, *own.dependencies))) or any(d.dependencies for d in own.dependencies):
            return super().get_route_handler()
        calls: list[tuple[str | None, Any]] = [(each.name, each.call) for each in own.dependencies]

        async def handle(request: Request) -> Response:
            values = {} if own.request_param_name is None else {own.request_param_name: request}
            for name, call in calls:
                value = await call(request)
                if name is not None:
                    values[name] = value
            response: Response = await endpoint(**values)
            return response

        return handle


def _takes_request_only(dependant: Dependant) -> bool:
    """Whether a coroutine function has no parameters but the request and results of dependencies."""
    others = (
        dependant.path_params, dependant.query_params, dependant.header_params, dependant.cookie_params,
        dependant.body_params, dependant.websocket_param_name, dependant.http_connection_param_name,
        dependant.response_param_name, dependant.background_tasks_param_name, dependant.security_scopes_param_name,
    )  # fmt: skip
    return not any(others) and iscoroutinefunction(dependant.call)


async def body_parts(request: Request, max_bytes: int, limit: str = "limits.max_body_bytes") -> AsyncGenerator[bytes]:
    """The body as it arrives, decoded. Raises UnknownEncoding, InvalidRequest for one that cannot be decoded,
    BodyTooLarge as soon as the limit is exceeded, or ClientGone."""
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise BodyTooLarge(f"the body is longer than {limit} {max_bytes}")
            yield part
    except ClientDisconnect:
        raise ClientGone(f"the client disconnected after {num_bytes} bytes of its request") from None


async def read_bytes(request: Request, max_bytes: int, limit: str = "limits.max_body_bytes") -> bytes:
    """The whole body. Raises what `body_parts` raises."""
    return b"".join([part async for part in body_parts(request, max_bytes, limit)])


async def read_form(request: Request, max_bytes: int, limit: str, *, max_files: int) -> FormData:
    """A multipart body whose files have at most `max_bytes` and are spooled to disk; the caller closes it.

    Raises UnknownContentType, BodyTooLarge, ClientGone, InvalidRequest.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM_TYPE:
        raise UnknownContentType(f"the body's Content-Type is {kind[:80]!r}; send the file as {FORM_TYPE}")
    parts = body_parts(request, max_bytes + FORM_BYTES, f"{limit} {max_bytes} and the fields of a form, together")
    parser = MultiPartParser(request.headers, parts, max_files=max_files, max_fields=16, max_part_size=MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the body is not such a form: {error.message[:200]}", param="file") from error
    if any(isinstance(value, UploadFile) and (value.size or 0) > max_bytes for value in form.values()):
        await form.close()
        raise BodyTooLarge(f"the file is longer than {limit} {max_bytes}")
    return form


async def read_unused_body(request: Request) -> None:
    """Read the body of a route that uses none, because Serve would buffer it. Raises what `read_bytes` raises."""
    if _is_empty(request):
        return
    route = request.scope.get("route")
    uses_body = isinstance(route, APIRoute) and (body_model(route) or "requestBody" in (route.openapi_extra or {}))
    if not uses_body:
        await read_bytes(request, MAX_UNUSED_BYTES, "what this route reads,")


def _is_empty(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


# -- queries --


class WholeNumber:
    """Annotation of an integer query parameter: only digits, from `lowest` to `highest`."""

    def __init__(self, lowest: int, highest: int) -> None:
        self.lowest, self.highest = lowest, highest

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = core_schema.int_schema(ge=self.lowest, le=self.highest)
        return core_schema.no_info_before_validator_function(self.number, number)

    def number(self, text: object) -> int:
        if isinstance(text, int):
            return text
        is_number = isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 17
        if not is_number or not self.lowest <= (found := int(str(text))) <= self.highest:
            raise ValueError(f"it is a whole number from {self.lowest} to {self.highest}")
        return found


def _flag(text: object) -> object:
    if not isinstance(text, str):
        return text
    found = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if found is None:
        raise ValueError("it is true or false")
    return found


Flag = Annotated[bool, BeforeValidator(_flag)]
Limit = Annotated[int, WholeNumber(1, MAX_PAGE)]
#: Up to the year 5138.
UnixTime = Annotated[int, WholeNumber(0, 10**11)]
Order = Literal["asc", "desc"]


class QueryParams(BaseModel):
    """Base of query models. A client sends a list as `name[]=` and an object as `name[key]=`; the field is `name`."""

    @model_validator(mode="before")
    @classmethod
    def _without_brackets(cls, given: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in given.items():
            plain, _, rest = name.partition("[")
            key = rest.removesuffix("]")
            if key and not key.isdigit() and isinstance(values.get(plain, {}), dict):
                values.setdefault(plain, {})[key] = value
            elif name != plain and plain in values:
                values[plain] = [*_as_list(value), *_as_list(values[plain])]
            else:
                values[plain] = _as_list(value) if name != plain else value
        return values


class PageQuery(QueryParams):
    """OpenAI's pagination: `after` is the id of the previous page's last entry."""

    limit: Limit = MAX_PAGE
    after: str | None = None


def query_names(route: APIRoute) -> tuple[str, ...]:
    """The query parameters of a route."""
    models = (each.field_info.annotation for each in route.dependant.query_params)
    return tuple(name for model in models if model is not None for name in model.model_fields)


async def check_query(request: Request) -> None:
    """Raises InvalidRequest for a query parameter that the route does not have."""
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    if not route.path.startswith("/v1/") or (request.method == "POST" and route.path in INFERENCE_PATHS):
        return
    known = query_names(route)  # inference routes ignore theirs: they have no parameters, and gateways add their own
    for name in request.query_params:
        if name.partition("[")[0] not in known:
            short_name = name[:_MAX_CHARS]
            its_own = f"it takes {', '.join(known)}" if known else "it takes none"
            raise InvalidRequest(
                f"the query has {short_name!r}, which {request.method} {route.path_format} does not know; "
                f"{its_own}{did_you_mean(name, known)}",
                param=short_name,
            )


def invalid_query(error: RequestValidationError) -> InvalidRequest:
    """FastAPI's validation error as one of ours: the parameter, its value and what it should be."""
    first = error.errors()[0]
    name = str(first["loc"][1])
    if first["type"] == "missing":
        return InvalidRequest(f"the query lacks {name}", param=name)
    expected = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        expected = f"it is {first['ctx']['expected'].replace(chr(39), '')}"
    return InvalidRequest(f"{name} is {str(first['input'])[:_MAX_CHARS]!r}; {expected}", param=name)


def page_body(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A list in OpenAI's format; `last_id` is the `after` of the next page."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
