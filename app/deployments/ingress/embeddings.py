"""Texts to vectors: what POST /v1/embeddings and the Python handle's `embed` do.

In: a parsed body, and who sent it. Out: a `Job` of requests that end with a vector, and those vectors in the order of
the texts. They take the same way to an engine as requests that generate. Rule: one failure ends all of a request's.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from pydantic_core import to_json

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.preprocess.preprocessor import RequestPreprocessor
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.embeddings import EmbeddingsRequest
from app.deployments.ingress.serializers.generate import usage_body
from app.engine.errors import ContextOverflow, EngineFailure, InvalidRequest
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams

#: Texts of one request, as at OpenAI.
MAX_TEXTS = 2048
#: Of which so many are under way at a time: the rest waits here, not in an engine's queue.
MAX_OPEN = 64


class Embedder:
    """One per ingress process. `clock` gives Unix time."""

    def __init__(
        self, frontend: RequestPreprocessor, source: Dispatcher, tenancy: RequestAccounting, clock: Callable[[], float]
    ) -> None:
        self._frontend = frontend
        self._source = source
        self._tenancy = tenancy
        self._clock = clock

    async def job(self, body: EmbeddingsRequest, caller: Principal, request_id: str | None = None) -> GenerationTask:
        """request_id: as its sender calls it. Raises NotFound, InvalidRequest, ContextOverflow, LimitError."""
        arrival_s = self._clock()
        ref = await self._frontend.finder.find(body.model, caller, body.lora_path, body.user, body.adapters)
        texts = body.texts
        if not 1 <= len(texts) <= MAX_TEXTS:
            raise InvalidRequest(f"input has {len(texts)} texts; from 1 to {MAX_TEXTS} are embedded", param="input")
        pooling = self._pooling(body)
        token_ids = await self._frontend.prompt_ids(texts, "input")
        self._check_lengths(texts, token_ids)
        given = "" if request_id is None else f"{request_id}."
        request_id = f"embd-{given}{secrets.token_hex(12)}"
        requests = tuple(
            GenerateRequest(
                request_id=f"{request_id}-{index}",
                tenant_id=caller.tenant_id,
                token_ids=tuple(ids),
                sampling=SamplingParams(),
                adapter=ref if is_needed else None,
                unactivated=None if is_needed else ref,
                weight=caller.tenant.weight,
                cache_salt=caller.tenant.salt,
                arrival_s=arrival_s,
                pooling=pooling,
                key_id=caller.key_id,
                is_batch=caller.is_batch,
            )
            for index, (ids, is_needed) in enumerate(
                zip(token_ids, self._frontend.names.needed(ref, token_ids), strict=True)
            )
        )
        deadline_s = asyncio.get_running_loop().time() + self._frontend.limits.request_timeout_s
        decoder = self._frontend.text_model.decoder
        reservation = await self._tenancy.admit(caller, requests)
        return GenerationTask(
            request_id, requests, caller, reservation, (), 1, deadline_s, self._source, decoder, self._clock
        )

    def _pooling(self, body: EmbeddingsRequest) -> PoolingParams:
        spec = self._frontend.text_model.spec
        if body.dimensions is not None and body.dimensions > spec.hidden_size:
            raise InvalidRequest(
                f"dimensions is {body.dimensions} but {body.model[:80]!r} has {spec.hidden_size}", param="dimensions"
            )
        return PoolingParams(body.pooling or spec.pooling, body.dimensions)

    def _check_lengths(self, texts: Sequence[str | list[int]], token_ids: Sequence[Sequence[int]]) -> None:
        """An empty text is refused as at OpenAI, also where the model would begin and end it with tokens of its own."""
        most = self._frontend.text_model.max_model_len
        for index, (text, ids) in enumerate(zip(texts, token_ids, strict=True)):
            if not text or not ids:
                raise InvalidRequest(f"text {index} of input has no tokens; at least one is needed", param="input")
            if len(ids) > most:
                raise ContextOverflow(
                    f"text {index} of input has {len(ids)} tokens but the context holds {most}; embed it in parts",
                    param="input",
                )


async def vectors(job: GenerationTask) -> list[bytes]:
    """The job's vectors as little-endian float32, in the order of its texts. Raises what a text meets."""
    places = asyncio.Semaphore(MAX_OPEN)
    tasks = [asyncio.create_task(_vector(job, index, places)) for index in range(len(job.requests))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(job: GenerationTask, index: int, places: asyncio.Semaphore) -> bytes:
    async with places, aclosing(job.source.stream(job.requests[index], job.deadline_s)) as chunks:
        async for chunk in chunks:
            if chunk.error is not None:
                raise chunk.error
            if chunk.usage is not None:
                job.progress.usages[index] = chunk.usage
            if chunk.embedding:
                return chunk.embedding
    raise EngineFailure(f"the engine ended request {job.requests[index].request_id} without its embedding")


def as_floats(vector: bytes) -> list[float]:
    """A vector's numbers."""
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def answer(job: GenerationTask, body: EmbeddingsRequest, found: Sequence[bytes]) -> bytes:
    """The JSON that OpenAI's clients read; "base64" is of the numbers as little-endian float32."""
    tell = _as_base64 if body.encoding_format == "base64" else as_floats
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": tell(vector)} for index, vector in enumerate(found)
    ]
    usage = usage_body(job.usages)
    counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
    return to_json({"object": "list", "data": data, "model": body.model, "usage": counts})


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
