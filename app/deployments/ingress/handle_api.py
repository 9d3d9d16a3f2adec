"""Calls of other Ray jobs through the deployment's handle: generation, embeddings, and some of management.

Every generation and embedding is counted once under the route "handle". Callers need not have this package, so errors
are Python's own (`builtin_errors`); their text is the code and message of the HTTP error, "model_not_found: there is no
...". ValueError means a mistake of the caller, LookupError a name that does not exist, then PermissionError and
TimeoutError; RuntimeError is a failure of the service.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import as_floats, vectors
from app.deployments.ingress.error_responses import TABLE, ClientGone, error_reply
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import handle_principal, load_request
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.schemas.openai import GenerateBody
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.serializers.generate import generate_result
from app.deployments.ingress.serializers.loras import adapter_body, unload_body
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


async def load(service: IngressService, name: str, path: str) -> dict[str, Any]:
    """Load an adapter; returns once every ingress serves it. Raises the load's error."""
    request = load_request(handle_principal(), name, path, adapters=service.adapters_config)
    _, entry = await service.adapter_admin.store.load_and_wait(request)
    return adapter_body(entry)


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
