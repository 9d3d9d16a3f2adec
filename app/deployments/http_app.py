"""The HTTP surface: routes, bodies, streams and nothing else.

In: an `HttpService` (the ingress). Out: a FastAPI application. Bodies are read with a limit and parsed
strictly; every error leaves through `http_errors`. The first event of a stream is waited for before
the status line is sent, so that a refused request has its proper code. A client that goes away cancels
its work, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.deployments.answers import Answer, AnswerFormat, usage_body
from app.deployments.frontend import Frontend, Job
from app.deployments.http_errors import BodyTooLarge, ClientGone, InvalidJson, error_answer
from app.deployments.openai_schema import (
    BodyT,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    LoadAdapterBody,
    RegisterAdapterBody,
    UnloadAdapterBody,
    parse_body,
)
from app.deployments.registry.entries import CatalogEntry
from app.engine.errors import NotFound, NotReady, PolyloraError
from app.engine.request import Usage

T = TypeVar("T")


class HttpService(Protocol):
    """What the routes need of the ingress."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def base_name(self) -> str: ...

    def adapters(self) -> Sequence[CatalogEntry]: ...

    def is_ready(self) -> bool: ...

    def observe(self, route: str, status: int, job: Job | None, usages: Sequence[Usage | None]) -> None: ...

    async def load_adapter(self, name: str, path: str) -> CatalogEntry: ...

    async def unload_adapter(self, name: str) -> CatalogEntry: ...


def make_app(service: HttpService) -> FastAPI:
    """All routes over one service."""
    app = FastAPI(title="polylora", docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(request: Request, error: Exception) -> Response:
        answer = error_answer(error)
        route = getattr(request.scope.get("route"), "path", "none")
        service.observe(route.rsplit("/", 1)[-1], answer.status, None, [])
        return JSONResponse(answer.body, status_code=answer.status, headers=answer.headers)

    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(PolyloraError, refuse)
    _add_openai_routes(app, service)
    _add_generate_route(app, service)
    _add_adapter_routes(app, service)

    @app.get("/health")
    async def health() -> Response:
        if not service.is_ready():
            raise NotReady("no engine replica is ready", retry_after_s=5)
        return JSONResponse({"status": "ok"})

    return app


def _add_openai_routes(app: FastAPI, service: HttpService) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": model_list(service)})

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        for entry in model_list(service):
            if entry["id"] == name or f"{service.base_name}:{entry['id']}" == name:
                return JSONResponse(entry)
        raise NotFound(f"there is no model or adapter {name[:80]!r}; GET /v1/models lists what there is")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse_body(ChatCompletionRequest, await read_json(request, service.frontend.limits.max_body_bytes))
        job = await service.frontend.chat(body)
        return await _respond(request, service, body, job, want_logprobs=body.logprobs)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await read_json(request, service.frontend.limits.max_body_bytes))
        job = await service.frontend.completion(body)
        return await _respond(request, service, body, job, want_logprobs=body.logprobs is not None)


async def _respond(
    request: Request,
    service: HttpService,
    body: ChatCompletionRequest | CompletionRequest,
    job: Job,
    *,
    want_logprobs: bool,
) -> Response:
    route = "chat" if isinstance(body, ChatCompletionRequest) else "completions"
    model = service.frontend.text_model
    answer_format = AnswerFormat(
        is_chat=route == "chat",
        request_id=job.request_id,
        model=body.model,
        token_text=model.token_text,
        token_bytes=model.token_bytes,
        want_logprobs=want_logprobs,
    )
    if not body.stream:
        answers = await while_connected(request, job.answers())
        service.observe(route, 200, job, [answer.usage for answer in answers])
        return JSONResponse(answer_format.body(answers, job.num_per_prompt))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    usages: list[Usage | None] = [None] * len(job.requests)
    events = _events(job, answer_format, include_usage, usages)
    first = await while_connected(request, anext(events))

    async def stream() -> AsyncGenerator[str]:
        status = 200
        try:
            async with aclosing(events):
                yield first
                async for event in events:
                    yield event
                yield "data: [DONE]\n\n"
        except Exception as error:
            # The status line is out: OpenAI's clients look for an error object in the stream.
            answer = error_answer(error)
            status = answer.status
            yield _sse(answer.body)
        finally:
            service.observe(route, status, job, usages)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(
    job: Job, answer_format: AnswerFormat, include_usage: bool, usages: list[Usage | None]
) -> AsyncGenerator[str]:
    offsets = [0] * len(job.requests)
    started = [not answer_format.is_chat] * len(job.requests)
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            text = ""
            if not started[index]:
                started[index] = True
                text = _sse(answer_format.role_event(index))
            usages[index] = delta.usage or usages[index]
            yield text + _sse(answer_format.event(index, delta, offsets[index]))
            offsets[index] += len(delta.text)
    if include_usage:
        yield _sse(answer_format.usage_event(usages, job.num_per_prompt))


def _add_generate_route(app: FastAPI, service: HttpService) -> None:
    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = parse_body(GenerateBody, await read_json(request, service.frontend.limits.max_body_bytes))
        job = await service.frontend.generate(body)
        answers = await while_connected(request, job.answers())
        service.observe("generate", 200, job, [answer.usage for answer in answers])
        results = [generate_result(job, index, answer) for index, answer in enumerate(answers)]
        is_single = isinstance(body.text, str) and body.sampling_params.n == 1
        return JSONResponse(results[0] if is_single else results)


def generate_result(job: Job, index: int, answer: Answer) -> dict[str, Any]:
    """One answer of /generate and of the Python handle."""
    adapter = job.requests[index].adapter
    usage = usage_body([answer.usage])
    return {
        "text": answer.text,
        "meta_info": {
            "id": job.requests[index].request_id,
            "lora": adapter.name if adapter is not None else None,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        },
    }


def _add_adapter_routes(app: FastAPI, service: HttpService) -> None:
    async def body_of(kind: type[BodyT], request: Request) -> BodyT:
        return parse_body(kind, await read_json(request, service.frontend.limits.max_body_bytes))

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await body_of(LoadAdapterBody, request)
        return JSONResponse(adapter_body(await service.load_adapter(body.lora_name, body.lora_path)))

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await body_of(UnloadAdapterBody, request)
        return JSONResponse(adapter_body(await service.unload_adapter(body.lora_name)) | {"status": "unloaded"})

    @app.get("/v1/loras")
    async def adapters() -> Response:
        return JSONResponse({"object": "list", "data": [adapter_body(entry) for entry in service.adapters()]})

    @app.post("/v1/loras")
    async def register(request: Request) -> Response:
        body = await body_of(RegisterAdapterBody, request)
        return JSONResponse(adapter_body(await service.load_adapter(body.name, body.path)), status_code=201)

    @app.get("/v1/loras/{name}")
    async def adapter(name: str) -> Response:
        for entry in service.adapters():
            if entry.ref.name == name:
                return JSONResponse(adapter_body(entry))
        raise NotFound(f"no adapter is registered as {name[:80]!r}; GET /v1/loras lists the registered ones")

    @app.delete("/v1/loras/{name}")
    async def delete(name: str) -> Response:
        return JSONResponse(adapter_body(await service.unload_adapter(name)) | {"status": "unloaded"})


def adapter_body(entry: CatalogEntry) -> dict[str, Any]:
    """One adapter as the management routes show it."""
    return {
        "id": entry.ref.name,
        "object": "lora",
        "digest": entry.ref.digest,
        "generation": entry.ref.generation,
        "path": entry.ref.uri,
        "max_rank": entry.max_rank,
        "size_bytes": entry.size_bytes,
        "created": int(entry.registered_s),
        "status": "registered",
    }


def model_list(service: HttpService) -> list[dict[str, Any]]:
    """The base and its adapters, as vLLM lists them: an adapter's `parent` is the base, `root` its contents."""
    base = {
        "id": service.base_name,
        "object": "model",
        "created": 0,
        "owned_by": "polylora",
        "root": service.base_name,
        "parent": None,
        "max_model_len": service.frontend.text_model.max_context,
    }
    adapters = [
        {
            "id": entry.ref.name,
            "object": "model",
            "created": int(entry.registered_s),
            "owned_by": "polylora",
            "root": entry.ref.uri,
            "parent": service.base_name,
        }
        for entry in service.adapters()
    ]
    return [base, *adapters]


async def read_json(request: Request, max_bytes: int) -> object:
    """The body, decoded. Raises BodyTooLarge as soon as the limit is passed, InvalidJson."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is longer than limits.max_body_bytes {max_bytes}")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise InvalidJson(f"the body is not JSON: {str(error)[:200] or type(error).__name__}") from error


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; if the client goes away first, cancels it and raises ClientGone."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client went away before the answer")
        return task.result()
    finally:
        for unfinished in (task, leaving):
            if not unfinished.done():
                unfinished.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return values


def _sse(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _http_exception(_: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in OpenAI's shape."""
    assert isinstance(error, HTTPException), "registered for it"
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "no_route"}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)
