"""Calls of other Ray jobs through the deployment's handle: generation, embeddings, a few calls of management.

Every generation and embedding is counted once under the route "handle", however it ends. A caller need not have this
package, so errors are Python's own (`builtin_errors`), whose text is the code and the message that HTTP would have
answered, "model_not_found: there is no ...". Their class says what to do: ValueError is the caller's mistake,
LookupError a name that does not exist, then PermissionError and TimeoutError; RuntimeError is the service's trouble.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import as_floats, vectors
from app.deployments.ingress.error_responses import TABLE, ClientGone, error_reply
from app.deployments.ingress.principal import handle_principal, load_request
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.schemas.openai import GenerateBody
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.serializers.generate import generate_result
from app.deployments.ingress.serializers.loras import adapter_body, unload_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import CatalogEntry
from app.engine.errors import InvalidRequest

#: By the status of the HTTP answer; others of 400 to 499 are ValueErrors.
_KINDS: dict[int, type[Exception]] = {
    401: PermissionError,
    403: PermissionError,
    404: LookupError,
    429: RuntimeError,
    504: TimeoutError,
}


class _Call:
    """One call as it is counted: what it became; the job knows what it cost so far."""

    job: GenerationTask | None = None


async def generate(
    service: IngressService,
    text: str | list[str],
    sampling_params: dict[str, Any] | None,
    adapter: str | list[str | None] | None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """One result for one text, a list for a list. Raises what `RequestPreprocessor.generate` and the engine raise."""
    with _counted(service) as call:
        job = call.job = await _job(service, text, sampling_params, adapter)
        answers = await job.answers()
    results = [generate_result(job, index, answer) for index, answer in enumerate(answers)]
    return results[0] if isinstance(text, str) and job.num_per_prompt == 1 else results


async def stream(
    service: IngressService, text: str, sampling_params: dict[str, Any] | None, adapter: str | None
) -> AsyncGenerator[str]:
    """Pieces of one answer's text as they come. Raises as `generate`; InvalidRequest for several answers."""
    with _counted(service) as call:
        job = call.job = await _job(service, text, sampling_params, adapter)
        if len(job.requests) != 1:
            raise InvalidRequest(
                f"{len(job.requests)} answers would be mixed in one stream; ask for each with a stream of its own",
                param="text" if job.num_per_prompt == 1 else "sampling_params.n",
            )
        async with aclosing(job.deltas()) as deltas:
            async for _, delta in deltas:
                if delta.text:
                    yield delta.text


async def embed(
    service: IngressService, text: str | list[str], adapter: str | None, pooling: str | None, dimensions: int | None
) -> list[float] | list[list[float]]:
    """One vector of length 1 for one text, a list for a list. Raises what `Embedder.job` and the engine raise."""
    fields = {
        "model": service.base_name, "input": text, "lora_path": adapter, "pooling": pooling, "dimensions": dimensions
    }  # fmt: skip
    with _counted(service) as call:
        job = call.job = await service.embedder.job(parse_body(EmbeddingsRequest, fields), handle_principal())
        found = [as_floats(vector) for vector in await vectors(job)]
    return found[0] if isinstance(text, str) else found


def list_adapters(service: IngressService) -> list[dict[str, Any]]:
    """The caller's adapters as this ingress knows them, by name."""
    tenant_id, registry = handle_principal().tenant_id, service.registry
    found = registry.page((CatalogEntry,), limit=max(1, registry.num_adapters), tenant_id=tenant_id)
    return [adapter_body(entry) for entry in found.entries if isinstance(entry, CatalogEntry)]


async def load(service: IngressService, name: str, path: str) -> dict[str, Any]:
    """Load an adapter; when this returns every ingress serves it. Raises what made it fail."""
    caller = handle_principal()
    return adapter_body((await service.management.store.load_and_wait(load_request(caller, name, path)))[1])


async def unload(service: IngressService, name: str) -> dict[str, Any]:
    """Unload an adapter; when this returns its rows are free. Raises NotFound, AdapterBusy."""
    caller = handle_principal()
    job, entry = await service.management.unload(name, tenant_id=caller.tenant_id, who=caller.who)
    return unload_body(entry, job)


@contextmanager
def builtin_errors() -> Iterator[None]:
    """Raises the plain form of whatever is raised inside; an end of the call (cancelled, closed) is left as it is."""
    try:
        yield
    except Exception as error:
        raise builtin_error(error) from None


def builtin_error(error: Exception) -> Exception:
    """One of Python's own."""
    answer = error_reply(error)
    told = answer.body["error"]
    kind = _KINDS.get(answer.status, ValueError if answer.status < 500 else RuntimeError)
    return kind(f"{told['code']}: {told['message']}")


async def _job(
    service: IngressService,
    text: str | list[str],
    sampling_params: dict[str, Any] | None,
    adapter: str | list[str | None] | None,
) -> GenerationTask:
    fields = {"text": text, "sampling_params": sampling_params or {}, "lora_path": adapter}
    return await service.frontend.generate(parse_body(GenerateBody, fields), handle_principal())


@contextmanager
def _counted(service: IngressService) -> Iterator[_Call]:
    call, status = _Call(), TABLE[ClientGone].status
    try:
        yield call
        status = 200
    except Exception as error:
        status = error_reply(error).status
        raise
    finally:
        service.observe("handle", status, call.job)
