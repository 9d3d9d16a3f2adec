"""Calls of other Ray jobs through the deployment's handle: generation, embeddings, and some of management.

Chats and completions take the fields of their HTTP routes and return the same objects. Every generation and embedding
is counted once under the route "handle". Callers need not have this package, so errors are Python's own
(`builtin_errors`); their text is the code and message of the HTTP error, "model_not_found: there is no ...". ValueError
means a mistake of the caller, LookupError a name that does not exist, then PermissionError and TimeoutError;
RuntimeError is a failure of the service.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from app.deployments.ingress.adapter_registration import load_and_wait
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import as_floats, vectors
from app.deployments.ingress.error_responses import TABLE, ClientGone, error_reply
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.schemas.loras import RegisterAdapterBody
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest, GenerateBody
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.serializers.completion_events import completion_events, sse_bodies
from app.deployments.ingress.serializers.generate import generate_result
from app.deployments.ingress.serializers.loras import adapter_body, unload_body
from app.deployments.ingress.serializers.openai import chat_serializer
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import CatalogEntry
from app.engine.errors import InvalidRequest

#: HTTP status -> exception; other 4xx are ValueErrors.
_KINDS: dict[int, type[Exception]] = {
    401: PermissionError,
    403: PermissionError,
    404: LookupError,
    429: RuntimeError,
    504: TimeoutError,
}


class _Call:
    """A call being counted; `task` is set once it exists."""

    task: GenerationTask | None = None


async def generate(
    service: IngressService,
    text: str | list[str],
    sampling_params: dict[str, Any] | None,
    adapter: str | list[str | None] | None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """One result for one text, a list for a list. Raises the errors of `RequestPreprocessor.generate` and of the
    engine."""
    with _count_call(service) as call:
        task = call.task = await _task(service, text, sampling_params, adapter)
        answers = await task.answers()
    results = [generate_result(task, index, answer) for index, answer in enumerate(answers)]
    return results[0] if isinstance(text, str) and task.num_per_prompt == 1 else results


async def stream(
    service: IngressService, text: str, sampling_params: dict[str, Any] | None, adapter: str | None
) -> AsyncGenerator[str]:
    """Text of one answer, piece by piece. Raises like `generate`; InvalidRequest for several answers."""
    with _count_call(service) as call:
        task = call.task = await _task(service, text, sampling_params, adapter)
        if len(task.requests) != 1:
            raise InvalidRequest(
                f"a stream has one answer but {len(task.requests)} are requested; use one stream for each",
                param="text" if task.num_per_prompt == 1 else "sampling_params.n",
            )
        async with aclosing(task.deltas()) as deltas:
            async for _, delta in deltas:
                if delta.text:
                    yield delta.text


async def complete(
    service: IngressService, kind: type[ChatCompletionRequest | CompletionRequest], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The object that POST /v1/chat/completions or /v1/completions answers. Raises the errors of
    `RequestPreprocessor.chat` and of the engine."""
    with _count_call(service) as call:
        body = _completion_body(service, kind, fields)
        task = call.task = await _completion_task(service, body)
        serializer = chat_serializer(body, task)
        content = await serializer.content(await task.answers(), task.num_per_prompt)
        result: dict[str, Any] = await in_worker_if_long(len(content), lambda: from_json(content))
    return result


async def stream_events(
    service: IngressService, kind: type[ChatCompletionRequest | CompletionRequest], fields: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """The events of the streamed answer, as objects. Raises like `complete`."""
    with _count_call(service) as call:
        given = _completion_body(service, kind, fields, stream=True)
        task = call.task = await _completion_task(service, given)
        serializer = chat_serializer(given, task)
        async with aclosing(completion_events(task, serializer)) as pieces:
            async for piece in pieces:
                for body in sse_bodies(piece):
                    yield body


async def embed(
    service: IngressService, text: str | list[str], adapter: str | None, pooling: str | None, dimensions: int | None
) -> list[float] | list[list[float]]:
    """One normalized vector for one text, a list for a list. Raises the errors of `Embedder.task` and of the engine."""
    fields = {
        "model": service.exact_base_name, "input": text, "lora_path": adapter, "pooling": pooling,
        "dimensions": dimensions,
    }  # fmt: skip
    with _count_call(service) as call:
        task = call.task = await service.embedder.task(parse_body(EmbeddingsRequest, fields), handle_principal())
        found = await vectors(task)
        num_bytes = sum(map(len, found))
        result = await in_worker_if_long(num_bytes, lambda: [as_floats(vector) for vector in found])
    return result[0] if isinstance(text, str) else result


def list_adapters(service: IngressService) -> list[dict[str, Any]]:
    """The caller's adapters in this ingress's copy of the registry, by name."""
    tenant_id, registry = handle_principal().tenant_id, service.registry
    page = registry.page((CatalogEntry,), limit=max(1, registry.num_adapters), tenant_id=tenant_id)
    return [adapter_body(entry) for entry in page.entries if isinstance(entry, CatalogEntry)]


async def load(
    service: IngressService, name: str, path: str | None, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Load an adapter with the options of POST /v1/loras; returns once every ingress serves it, or with `lazy` once it
    is registered. Raises InvalidRequest and the load's error."""
    body = parse_body(RegisterAdapterBody, {"name": name, "path": path, **options})
    return await load_and_wait(body, handle_principal(), service)


async def unload(service: IngressService, name: str) -> dict[str, Any]:
    """Unload an adapter; returns once its rows are free. Raises NotFound, AdapterBusy."""
    caller = handle_principal()
    job, entry = await service.adapter_admin.unload(name, tenant_id=caller.tenant_id, who=caller.who)
    return unload_body(entry, job)


@contextmanager
def builtin_errors() -> Iterator[None]:
    """Convert exceptions of the block to Python's own; cancellation passes through."""
    try:
        yield
    except Exception as error:
        raise builtin_error(error) from None


def builtin_error(error: Exception) -> Exception:
    reply = error_reply(error)
    body = reply.body["error"]
    kind = _KINDS.get(reply.status, ValueError if reply.status < 500 else RuntimeError)
    return kind(f"{body['code']}: {body['message']}")


def _completion_body(
    service: IngressService,
    kind: type[ChatCompletionRequest | CompletionRequest],
    fields: Mapping[str, Any],
    *,
    stream: bool = False,
) -> ChatCompletionRequest | CompletionRequest:
    """Without a model the base is meant, also while an alias has its name."""
    if "stream" in fields:
        raise InvalidRequest(
            "stream is not a field of this call; stream_chat and stream_complete stream", param="stream"
        )
    given = {name: value for name, value in fields.items() if value is not None}
    return parse_body(kind, {"model": service.exact_base_name, **given, "stream": stream})


async def _completion_task(service: IngressService, body: ChatCompletionRequest | CompletionRequest) -> GenerationTask:
    if isinstance(body, ChatCompletionRequest):
        return await service.preprocessor.chat(body, handle_principal())
    return await service.preprocessor.completion(body, handle_principal())


async def _task(
    service: IngressService,
    text: str | list[str],
    sampling_params: dict[str, Any] | None,
    adapter: str | list[str | None] | None,
) -> GenerationTask:
    fields = {"text": text, "sampling_params": sampling_params or {}, "lora_path": adapter}
    return await service.preprocessor.generate(parse_body(GenerateBody, fields), handle_principal())


@contextmanager
def _count_call(service: IngressService) -> Iterator[_Call]:
    call, status = _Call(), TABLE[ClientGone].status
    try:
        yield call
        status = 200
    except Exception as error:
        status = error_reply(error).status
        raise
    finally:
        service.observe("handle", status, call.task)
