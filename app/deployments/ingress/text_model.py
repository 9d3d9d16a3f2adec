"""What the ingress needs of a base model's texts.

In: texts and conversations. Out: token ids, and the other way round. Rule: what is long is worked on in a thread, for
it would hold up every stream of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from app.deployments.ingress.structured import AskedGrammar
from app.deployments.ingress.text import Decoder
from app.engine.models.spec import ModelSpec
from app.engine.models.tool_formats import ToolFormat

T = TypeVar("T")

#: What a request has more characters or token ids of than this is worked on in a thread: it would hold up every stream
#: of this process.
MAX_INLINE_CHARS = 20_000


class TextModel(Protocol):
    """The base model as far as text is concerned."""

    @property
    def max_context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def spec(self) -> ModelSpec: ...

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_answer(self, text: str) -> Sequence[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Sequence[int]: ...

    def tool_format(self, text: str = "") -> ToolFormat: ...

    def specials(self, form: ToolFormat) -> Mapping[str, int]: ...

    def check_grammar(self, wanted: AskedGrammar) -> None: ...

    def decoder(self, shown: frozenset[int] = frozenset()) -> Decoder: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def text_bytes(self, token_id: int) -> bytes: ...


async def beside_if_long(length: int, work: Callable[[], T]) -> T:
    """What is done for each of so many characters or token ids, in a thread where they are many."""
    return await asyncio.to_thread(work) if length > MAX_INLINE_CHARS else work()
