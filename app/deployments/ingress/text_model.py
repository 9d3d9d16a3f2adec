"""The base model's text side: words into token ids and back.

In: the configuration. Out: a `BaseText`. The model's description is read, its weights are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.config import AppConfig
from app.deployments.ingress.text import Decoder
from app.engine.adapters.chats import encode_chat
from app.engine.adapters.text import AdapterText
from app.engine.models.checkpoint import open_model
from app.engine.models.spec import ModelSpec
from app.engine.models.template_process import TemplateProcess
from app.engine.models.tokenizer import Tokenizer, load_tokenizer


def open_text(config: AppConfig) -> BaseText:
    """The text side of the configured base model. Raises SourceError, CheckpointError."""
    checkpoint = open_model(config.model.uri, config.model.name)
    has_memory = checkpoint.spec.encoder is None
    kv_tokens = has_memory * config.engine.num_kv_blocks * config.engine.block_size
    positions = checkpoint.spec.max_positions
    max_context = min(config.engine.max_context or positions, kv_tokens or positions)  # 0 blocks: as many as fit
    return BaseText(load_tokenizer(checkpoint.tokenizer_source), checkpoint.spec, max_context)


class BaseText:
    """`TextModel` over a tokenizer. `max_context` is the longest prompt plus answer the engines take."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._templates = TemplateProcess()
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.max_context = max_context

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], text: str = "") -> Sequence[int]:
        """The conversation as the model's template writes it, or the adapter's own, up to where the assistant answers.

        text: what of the adapter's text is its own (`AdapterCard.text`); it may take `TemplateProcess`'s time.
        """
        return encode_chat(self._tokenizer, messages, AdapterText.parsed(text), self._templates)

    def decoder(self) -> Decoder:
        return self._tokenizer.incremental_decoder()

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to an answer; a special token adds none."""
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)
