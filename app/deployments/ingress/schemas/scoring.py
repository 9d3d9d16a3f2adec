"""Bodies and answers of /v1/score, /v1/rerank and /v1/classify: vLLM's, and for reranking Jina's and Cohere's."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from app.deployments.ingress.schemas import ignored_fields
from app.deployments.ingress.schemas.completions import EmbeddingUsage
from app.deployments.ingress.schemas.openai import Texts, entries
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds

#: The fields of a score's two sides, which other servers spell in several ways.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

OneOrMore = Annotated[str | Items[str] | None, Field(default=None)]


class _ScoringBody(Body):
    """`use_activation` false: the head's own numbers, instead of a sigmoid, or a softmax over several labels."""

    location = ""
    ignored = ignored_fields.SCORING_REQUEST

    model: str
    use_activation: bool = True
    lora_path: str | None = None
    user: str | None = None  # an alias sends equal users to the same adapter; changes nothing else


class ScoreRequest(_ScoringBody):
    """One text against one or many, or as many pairs as there are texts on both sides."""

    text_1: OneOrMore
    text_2: OneOrMore
    queries: OneOrMore
    documents: OneOrMore
    items: OneOrMore
    data_1: OneOrMore
    data_2: OneOrMore

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        given = {name for pair in SIDES for name in pair if getattr(self, name) is not None}
        if given not in [set(pair) for pair in SIDES]:
            raise ValueError("give the texts as text_1 and text_2, or as queries and documents")
        return self

    @property
    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """(name, texts) of each side."""
        first, second = next(pair for pair in SIDES if None not in (getattr(self, pair[0]), getattr(self, pair[1])))
        return (first, _texts(getattr(self, first))), (second, _texts(getattr(self, second)))


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


class RerankDocumentBody(Body):
    location = "documents"

    text: str


class RerankRequest(_ScoringBody):
    """`top_n` 0 returns all documents, the most relevant first."""

    query: str
    documents: Items[str | RerankDocumentBody]
    top_n: int = Field(default=0, ge=0, lt=2**31)
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ClassifyRequest(_ScoringBody):
    input: Texts

    @property
    def texts(self) -> list[str | list[int]]:
        """One entry per text: characters or token ids."""
        return entries(self.input)


class Score(ResponseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(ResponseModel):
    id: str
    object: Literal["list"]
    created: Seconds
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankedText(ResponseModel):
    text: str


class RerankResult(ResponseModel):
    """`index` is the document's place in the request."""

    index: int
    document: Omittable[RerankedText] = None
    relevance_score: float


class Ranking(ResponseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Classification(ResponseModel):
    """`label`: LABEL_0, LABEL_1, …: adapters' files do not name their labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(ResponseModel):
    id: str
    object: Literal["list"]
    created: Seconds
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
