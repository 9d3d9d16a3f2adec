"""What was chosen for a request, and how: a value that answers and headers tell.

In: nothing. Out: `Decision`. Rule: it says enough to be understood without the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from app.deployments.ingress.schemas.openai import WeightedAdapter

#: The chosen adapters and their scores: "sql=0.8300,tone=0.6400", or "base".
ROUTE_HEADER = "X-Polylora-Route"


class ScoredAdapter(NamedTuple):
    """A candidate and its cosine."""

    name: str
    owner_id: str
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and how."""

    chosen: tuple[ScoredAdapter, ...]
    num_candidates: int
    embedder: str
    threshold: float
    top_k: int

    @property
    def adapters(self) -> list[WeightedAdapter]:
        """Each with its share of the scores; one below zero, which a low threshold lets in, counts for none."""
        scores = [max(one.score, 0.0) for one in self.chosen]
        total = sum(scores)
        weights = [score / total if total else 1 / len(scores) for score in scores]
        return [WeightedAdapter(name=one.name, weight=each) for one, each in zip(self.chosen, weights, strict=True)]

    @property
    def header(self) -> str:
        return ",".join(f"{one.name}={one.score:.4f}" for one in self.chosen) or "base"

    def body(self) -> dict[str, Any]:
        """As answers and POST /v1/route tell it; no adapters: the base."""
        return {
            "adapters": [{"name": one.name, "score": one.score} for one in self.chosen],
            "num_candidates": self.num_candidates,
            "embedder": self.embedder,
            "threshold": self.threshold,
            "top_k": self.top_k,
        }
