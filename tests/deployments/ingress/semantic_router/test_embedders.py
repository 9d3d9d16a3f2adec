"""A small encoder beside the service: it loads with the room that its texts take, and embeds as the engine does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.deployments.ingress.semantic_router import embedders
from app.deployments.ingress.semantic_router.embedders import MAX_TOKENS, EncoderEmbedder
from app.engine.api import LLM
from app.engine.config import EngineConfig
from tests.engine import encoders


@pytest.mark.parametrize("num_positions", [60, 514])
async def test_an_encoder_of_any_length_embeds_long_texts(
    num_positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual ones take 512 tokens, more than a step of the default settings."""
    monkeypatch.setitem(encoders._SIZES, "max_position_embeddings", num_positions)
    monkeypatch.setattr(embedders, "MAX_CHARS", 3 * MAX_TOKENS)
    folder = encoders.save_encoder(encoders.tiny_encoder("bert"), tmp_path)
    long = "a b " * MAX_TOKENS
    embedder = EncoderEmbedder(str(folder))
    vectors = await embedder.embed(await embedder.tokenize(["c d", long]), None)
    with LLM(folder, EngineConfig(max_num_batched_tokens=1024)) as llm:
        most = min(num_positions, MAX_TOKENS)
        texts = [llm.tokenizer.encode(text[: 3 * MAX_TOKENS])[:most] for text in ("c d", long)]
        assert len(texts[1]) == most
        np.testing.assert_array_equal(vectors, np.stack(llm.embed(texts)))
