"""Scores by adapters with a score head: POST /v1/score, /v1/rerank and /v1/classify.

A text, or a pair of texts joined as transformers' tokenizer joins it, becomes one sequence, dispatched like an
embedding, whose only output are the head's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from pydantic_core import to_json

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import MAX_TEXTS, Embedder, as_floats, vectors
from app.deployments.ingress.preprocess.preprocessor import RequestPreprocessor
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService, in_worker_if_long
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from app.deployments.ingress.serializers.generate import prompt_usage
from app.deployments.registry.models import AUTO
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.score_head import pooling_of
from app.engine.errors import ContextOverflow, InvalidRequest
from app.engine.request import PoolingParams

ScoringRequest = ScoreRequest | RerankRequest | ClassifyRequest


class Scorer:
    """One per ingress process. `clock` gives Unix time."""

    def __init__(self, embedder: Embedder, preprocessor: RequestPreprocessor, clock: Callable[[], float]) -> None:
        self._embedder, self._preprocessor, self._clock = embedder, preprocessor, clock

    async def task(self, body: ScoringRequest, caller: Principal, request_id: str | None = None) -> GenerationTask:
        """`request_id` is the client's own. Raises NotFound, InvalidRequest, ContextOverflow, LimitError."""
        arrival_s = self._clock()
        if body.model == AUTO:
            raise InvalidRequest(
                f"model {AUTO!r} chooses an adapter that generates; name an adapter of task type SEQ_CLS", param="model"
            )
        ref = await self._preprocessor.resolver.resolve(body.model, caller, body.lora_path, body.user)
        if isinstance(body, ClassifyRequest):
            prefix, token_ids = "classify", await self._embedder.text_ids(body.texts, ref)
        elif isinstance(body, RerankRequest):
            sides = ("query", [body.query]), ("documents", body.texts)
            prefix, token_ids = "rerank", await self._pair_ids(*sides, ref)
        else:
            prefix, token_ids = "score", await self._pair_ids(*body.sides, ref)
        spec = self._preprocessor.tokenizer.spec
        pooling = PoolingParams(pooling_of(spec), task="classify" if prefix == "classify" else "score")
        return await self._embedder.start(prefix, ref, token_ids, pooling, caller, request_id, arrival_s)

    async def _pair_ids(
        self, first: tuple[str, Sequence[str]], second: tuple[str, Sequence[str]], ref: AdapterRef | None
    ) -> list[Sequence[int]]:
        """Token ids of each pair; `first` and `second` are a field's name and its texts."""
        (name, texts), (other_name, others) = first, second
        if not 1 <= len(others) <= MAX_TEXTS:
            raise InvalidRequest(
                f"{other_name} has {len(others)} texts; it must have 1 to {MAX_TEXTS}", param=other_name
            )
        if len(texts) not in (1, len(others)):
            raise InvalidRequest(
                f"{name} has {len(texts)} texts and {other_name} {len(others)}; give one, or one for each", param=name
            )
        texts = texts if len(texts) == len(others) else [texts[0]] * len(others)
        pairs, tokenizer = list(zip(texts, others, strict=True)), self._preprocessor.tokenizer_of(ref)
        length = sum(len(text) + len(other) for text, other in pairs)
        return await in_worker_if_long(
            length, lambda: [self._ids_of(tokenizer, *pair, index, other_name) for index, pair in enumerate(pairs)]
        )

    def _ids_of(self, tokenizer: TokenizerService, text: str, other: str, index: int, param: str) -> Sequence[int]:
        if not text and not other:
            raise InvalidRequest(f"pair {index} has no characters; at least one is needed", param=param)
        try:
            token_ids = tokenizer.encode_pair(text, other)
        except ContextOverflow as error:
            error.param = param
            raise
        if len(token_ids) > tokenizer.max_model_len:
            raise ContextOverflow(
                f"pair {index} has {len(token_ids)} tokens but the context holds {tokenizer.max_model_len}; shorten it",
                param=param,
            )
        return token_ids


async def scoring_answer(task: GenerationTask, body: ScoringRequest, created_s: float) -> bytes:
    """The response body, once the engines have answered. Raises the first sequence's error."""
    found = [as_floats(one) for one in await vectors(task)]
    outputs = [apply_activation(numbers) for numbers in found] if body.use_activation else found
    end = {"model": body.model, "usage": prompt_usage(task.usages)}
    if isinstance(body, RerankRequest):
        return to_json({"id": task.request_id, **end, "results": _rank_results(body, [score for (score,) in outputs])})
    start = {"id": task.request_id, "object": "list", "created": int(created_s), **end}
    if isinstance(body, ScoreRequest):
        data = [{"object": "score", "index": index, "score": score} for index, (score,) in enumerate(outputs)]
    else:
        data = [
            {"index": index, "label": f"LABEL_{np.argmax(probs)}", "probs": probs, "num_classes": len(probs)}
            for index, probs in enumerate(outputs)
        ]
    return to_json({**start, "data": data})


def apply_activation(numbers: Sequence[float]) -> list[float]:
    """The sigmoid of one number, the softmax of several, as transformers' text-classification pipeline."""
    if len(numbers) == 1:
        small = math.exp(-abs(numbers[0]))  # at most 1, so nothing overflows
        return [(1.0 if numbers[0] >= 0 else small) / (1.0 + small)]
    largest = max(numbers)
    weights = [math.exp(number - largest) for number in numbers]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _rank_results(body: RerankRequest, scores: Sequence[float]) -> list[dict[str, object]]:
    """The most relevant documents first; equal ones in the request's order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    texts = body.texts
    return [
        {"index": index}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        | {"relevance_score": scores[index]}
        for index in order
    ]
