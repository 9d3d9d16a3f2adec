"""Embeddings: POST /v1/embeddings and the Python handle's `embed`.

Each text becomes one sequence, dispatched like a generation, whose only output is a vector. If one fails, all of the
request fail.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from pydantic_core import to_json

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.dispatch.dispatcher import MAX_OPEN_EMBEDDINGS, Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask, PromptDecoder
from app.deployments.ingress.preprocess.preprocessor import RequestPreprocessor
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.serializers.generate import prompt_usage
from app.engine.adapters.card import AdapterRef
from app.engine.errors import ContextOverflow, InvalidRequest
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams

#: Texts in one request; OpenAI's limit.
MAX_TEXTS = 2048


class Embedder:
    """One per ingress process. `clock` gives Unix time."""

    def __init__(
        self,
        preprocessor: RequestPreprocessor,
        dispatcher: Dispatcher,
        accounting: RequestAccounting,
        clock: Callable[[], float],
    ) -> None:
        self._preprocessor = preprocessor
        self._dispatcher = dispatcher
        self._accounting = accounting
        self._clock = clock

    async def task(self, body: EmbeddingsRequest, caller: Principal, request_id: str | None = None) -> GenerationTask:
        """`request_id` is the client's own. Raises NotFound, InvalidRequest, ContextOverflow, LimitError."""
        arrival_s = self._clock()
        ref = await self._preprocessor.resolver.resolve(body.model, caller, body.lora_path, body.user, body.adapters)
        pooling = self._pooling(body)
        token_ids = await self.text_ids(body.texts, ref)
        return await self.start("embd", ref, token_ids, pooling, caller, request_id, arrival_s)

    async def text_ids(self, texts: Sequence[str | list[int]], ref: AdapterRef | None) -> list[Sequence[int]]:
        """Token ids of the texts of the field `input` for an adapter. Raises InvalidRequest, ContextOverflow."""
        if not 1 <= len(texts) <= MAX_TEXTS:
            raise InvalidRequest(f"input has {len(texts)} texts; it must have 1 to {MAX_TEXTS}", param="input")
        token_ids = await self._preprocessor.prompt_ids(texts, [ref] * len(texts), "input")
        self._check_lengths(texts, token_ids)
        return token_ids

    async def start(
        self,
        prefix: str,
        ref: AdapterRef | None,
        token_ids: Sequence[Sequence[int]],
        pooling: PoolingParams,
        caller: Principal,
        request_id: str | None,
        arrival_s: float,
    ) -> GenerationTask:
        """One sequence per text, admitted. prefix: of the ids that the service gives. Raises LimitError."""
        client_id = "" if request_id is None else f"{request_id}."
        request_id = f"{prefix}-{client_id}{secrets.token_hex(12)}"
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
                zip(token_ids, self._preprocessor.directory.needs_adapter(ref, token_ids), strict=True)
            )
        )
        deadline_s = asyncio.get_running_loop().time() + self._preprocessor.limits.request_timeout_s
        tokenizer = self._preprocessor.tokenizer_of(ref)
        decoders = (PromptDecoder(tokenizer, tokenizer.decoder),) * len(requests)
        reservation = await self._accounting.admit(caller, requests)
        return GenerationTask(
            request_id, requests, caller, reservation, (), 1, deadline_s, self._dispatcher, decoders, self._clock
        )

    def _pooling(self, body: EmbeddingsRequest) -> PoolingParams:
        spec = self._preprocessor.tokenizer.spec
        if body.dimensions is not None and body.dimensions > spec.hidden_size:
            raise InvalidRequest(
                f"dimensions is {body.dimensions} but {body.model[:80]!r} has {spec.hidden_size}", param="dimensions"
            )
        return PoolingParams(body.pooling or spec.pooling, body.dimensions)

    def _check_lengths(self, texts: Sequence[str | list[int]], token_ids: Sequence[Sequence[int]]) -> None:
        """An empty text is an error, as at OpenAI, even if the model adds special tokens around it."""
        most = self._preprocessor.tokenizer.max_model_len
        for index, (text, ids) in enumerate(zip(texts, token_ids, strict=True)):
            if not text or not ids:
                raise InvalidRequest(f"text {index} of input has no tokens; at least one is needed", param="input")
            if len(ids) > most:
                raise ContextOverflow(
                    f"text {index} of input has {len(ids)} tokens but the context holds {most}; split it",
                    param="input",
                )


async def vectors(task: GenerationTask) -> list[bytes]:
    """The task's vectors as little-endian float32, in the order of its texts. Raises the first sequence's error."""
    found = [b""] * len(task.requests)
    indices = iter(range(len(task.requests)))

    async def work() -> None:
        for index in indices:
            on_usage = partial(task.progress.usages.__setitem__, index)
            found[index] = await task.dispatcher.embedding(task.requests[index], task.deadline_s, on_usage)

    workers = [asyncio.create_task(work()) for _ in range(min(MAX_OPEN_EMBEDDINGS, len(task.requests)))]
    try:
        await asyncio.gather(*workers)
        return found
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def as_floats(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


async def answer(task: GenerationTask, body: EmbeddingsRequest, embeddings: Sequence[bytes]) -> bytes:
    """The response body in OpenAI's format; "base64" encodes the little-endian float32 bytes. Many vectors are
    written in a thread, one after the other.
    """
    encode = _as_base64 if body.encoding_format == "base64" else as_floats
    end = to_json({"model": body.model, "usage": prompt_usage(task.usages)})[1:]

    def to_bytes() -> bytes:
        data = b",".join(
            to_json({"object": "embedding", "index": index, "embedding": encode(vector)})
            for index, vector in enumerate(embeddings)
        )
        return b'{"object":"list","data":[%b],%b' % (data, end)

    return await in_worker_if_long(sum(map(len, embeddings)), to_bytes)


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
