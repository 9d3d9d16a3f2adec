"""Body of /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from app.deployments.ingress.schemas.openai import Count, Texts, WeightedAdapters, entries
from app.deployments.ingress.schemas.request_model import Body
from app.engine.models.spec import Pooling


class EmbeddingsRequest(Body):
    """OpenAI's body, and beside it `pooling` (the model's own by default), `lora_path` and `adapters`."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    pooling: Pooling | None = None
    lora_path: str | None = None
    adapters: WeightedAdapters = None
    user: str | None = None  # an alias sends equal users to the same adapter; changes nothing else

    @property
    def texts(self) -> list[str | list[int]]:
        """One entry per text: characters, or token ids."""
        return entries(self.input)
