"""Scores of texts by adapters with a score head, in the formats of vLLM, Jina and Cohere."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from app.deployments.ingress.http.middleware.request_log import request_id_of
from app.deployments.ingress.http.request_lifecycle import answer_headers, run_task
from app.deployments.ingress.http.request_parsing import JsonBody
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.scoring import (
    ClassificationList,
    ClassifyRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from app.deployments.ingress.scoring import ScoringRequest, scoring_answer
from app.deployments.ingress.service import IngressService


def add_scoring_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/score", response_model=ScoreList)
    async def score(request: Request, body: JsonBody[ScoreRequest]) -> Response:
        """Score pairs of texts with an adapter that has a score head of one label."""
        return await _respond(request, service, body, "score")

    @app.post("/v1/rerank", response_model=Ranking)
    async def rerank(request: Request, body: JsonBody[RerankRequest]) -> Response:
        """Order documents by their relevance to a query, with an adapter that has a score head of one label."""
        return await _respond(request, service, body, "rerank")

    @app.post("/v1/classify", response_model=ClassificationList)
    async def classify(request: Request, body: JsonBody[ClassifyRequest]) -> Response:
        """The probability of each label of a text, with an adapter that has a score head."""
        return await _respond(request, service, body, "classify")


async def _respond(request: Request, service: IngressService, body: ScoringRequest, route: str) -> Response:
    task = await service.scorer.task(body, inference_principal(request), request_id_of(request))
    request.state.task = task
    work = scoring_answer(task, body, service.accounting.clock())
    found = await run_task(request, service, task, route, work)
    return Response(found, media_type="application/json", headers=answer_headers(service, task))
