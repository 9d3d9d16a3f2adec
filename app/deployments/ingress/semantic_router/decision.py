"""The semantic router's decision, as responses and headers report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from app.deployments.ingress.schemas.openai import WeightedAdapter

#: The chosen adapters and their scores: "sql=0.8300,tone=0.6400", or "base".
ROUTE_HEADER = "X-Polylora-Route"


class ScoredAdapter(NamedTuple):
    """An adapter and how well its description fits the prompt: a cosine, or the mean of two (`candidates`)."""

    name: str
    owner_id: str
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen adapters (none: the base model) and the settings that led to them."""

    chosen: tuple[ScoredAdapter, ...]
    num_candidates: int
    embedder: str
    threshold: float
    top_k: int

    @property
    def adapters(self) -> list[WeightedAdapter]:
        """The adapters weighted by score; a negative score, which a low threshold admits, has weight 0."""
        scores = [max(one.score, 0.0) for one in self.chosen]
        total = sum(scores)
        weights = [score / total if total else 1 / len(scores) for score in scores]
        return [WeightedAdapter(name=one.name, weight=each) for one, each in zip(self.chosen, weights, strict=True)]

    @property
    def header(self) -> str:
        return ",".join(f"{one.name}={one.score:.4f}" for one in self.chosen) or "base"

    def body(self) -> dict[str, Any]:
        """The `routing` field of responses, and the body of POST /v1/route."""
        return {
            "adapters": [{"name": one.name, "score": one.score} for one in self.chosen],
            "num_candidates": self.num_candidates,
            "embedder": self.embedder,
            "threshold": self.threshold,
            "top_k": self.top_k,
        }
