"""Text embedders of the semantic router: the base model, or a small encoder in this process.

Both return unit vectors that do not depend on the batch. A decoder's vectors all point in one direction, which makes
every cosine close to 1; the mean over a few neutral sentences is therefore subtracted first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.deployments.ingress.dispatch.dispatcher import MAX_OPEN_EMBEDDINGS, Dispatcher
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.principal import Principal
from app.deployments.registry.models import DEFAULT_TENANT
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from app.engine.api import LLM

Floats = NDArray[np.float32]

#: Texts are cut to this many characters: the beginning of a prompt says what it is about.
MAX_CHARS = 2000
#: Tokens per text for an encoder in this process, which computes a text in one step.
MAX_TOKENS = 512
#: Sentences on unrelated topics.
NEUTRAL = (
    "Good morning, how are you today?",
    "The train leaves at half past nine.",
    "Write a short story about a lighthouse.",
    "What is the capital of Australia?",
    "SELECT name FROM users WHERE age > 30;",
    "def add(a, b): return a + b",
    "The patient complains of a headache since Monday.",
    "The parties agree to the following terms.",
    "Translate this sentence into French.",
    "Shares of the company fell by three percent.",
    "Mix the flour with two eggs and a cup of milk.",
    "legal: answers questions about contracts",
    "poems: writes verses in the style of old ballads",
    "support: answers customers who ask about their orders",
    "Please summarise the following article.",
    "Who won the match last night?",
)


class BaseEmbedder:
    """The base model on the service's own replicas, pooled over all tokens. `clock` returns Unix time."""

    has_price = True

    def __init__(
        self, name: str, tokenizer: TokenizerService, dispatcher: Dispatcher, wait_s: float, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._wait_s = wait_s
        self._clock = clock
        self._mean: Floats | None = None

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """See `TextEmbedder.tokenize`."""
        return [self._tokenizer.encode(text[:MAX_CHARS])[: self._tokenizer.max_model_len] for text in texts]

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> Floats:
        """See `TextEmbedder.embed`."""
        if self._tokenizer.spec.encoder is not None:
            return await self._vectors(token_ids, caller)
        if self._mean is None:
            self._mean = (await self._vectors(await self.tokenize(NEUTRAL), None)).mean(axis=0)
        centred = await self._vectors(token_ids, caller) - self._mean
        unit: Floats = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
        return unit

    async def _vectors(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> Floats:
        slots = asyncio.Semaphore(MAX_OPEN_EMBEDDINGS)
        vectors = await asyncio.gather(*(self._vector(of_text, caller, slots) for of_text in token_ids))
        return np.stack([np.frombuffer(vector, "<f4") for vector in vectors])

    async def _vector(self, token_ids: Sequence[int], caller: Principal | None, slots: asyncio.Semaphore) -> bytes:
        spec = self._tokenizer.spec
        request = GenerateRequest(
            request_id=f"route-{secrets.token_hex(12)}",
            tenant_id=DEFAULT_TENANT if caller is None else caller.tenant_id,
            token_ids=tuple(token_ids),
            sampling=SamplingParams(),
            weight=1.0 if caller is None else caller.tenant.weight,
            cache_salt=b"" if caller is None else caller.tenant.salt,
            arrival_s=self._clock(),
            pooling=PoolingParams(spec.pooling if spec.encoder is not None else "mean"),
            key_id="" if caller is None else caller.key_id,
        )
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        async with slots:
            return await self._dispatcher.embedding(request, deadline_s)


class EncoderEmbedder:
    """A small encoder in this process, loaded at its first use; one thread computes."""

    has_price = False

    def __init__(self, uri: str) -> None:
        self.name = uri
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router")
        self._llm: LLM | None = None

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """See `TextEmbedder.tokenize`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize, texts)

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> Floats:  # noqa: ARG002
        """See `TextEmbedder.embed`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, token_ids)

    def _tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        llm = self._encoder()
        most = min(llm.spec.max_positions, MAX_TOKENS)
        return [llm.tokenizer.encode(text[:MAX_CHARS])[:most] for text in texts]

    def _compute(self, token_ids: Sequence[Sequence[int]]) -> Floats:
        return np.stack(self._encoder().embed(token_ids))

    def _encoder(self) -> LLM:
        if self._llm is None:
            self._llm = load_encoder(self.name)
        return self._llm


def load_encoder(uri: str) -> LLM:
    """An engine for texts of up to `MAX_TOKENS`. Raises SourceError, CheckpointError, ConfigError."""
    from app.engine.api import LLM  # imports an engine, which most services do not have in this process
    from app.engine.config import EngineConfig
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    path = resolve_model(uri)
    most = min(load_checkpoint(path).spec.max_positions, MAX_TOKENS)
    sizes = {
        "lora_pool_rows": 0,
        "cpu": {"num_threads": 1},
        "max_model_len": most,
        "max_num_batched_tokens": most,
    }
    return LLM(path, EngineConfig.model_validate(sizes))
