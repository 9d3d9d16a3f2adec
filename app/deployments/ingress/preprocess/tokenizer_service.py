"""Tokenizer and chat templates of the base model: text to token ids and back.

Only the model's metadata is read, not its weights. Long texts are processed in a thread (`in_worker_if_long`), because
on the event loop they would delay every stream of the process.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from app.config import AppConfig
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar
from app.deployments.ingress.serializers.detokenizer import Decoder
from app.engine.adapters.adapter_chat import encode_chat, tool_template
from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer
from app.engine.errors import InvalidRequest
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.chat.tool_call_formats import ToolCallFormat, fixed_texts, tool_format
from app.engine.models.checkpoint import open_model
from app.engine.models.spec import ModelSpec
from app.engine.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from app.engine.structured_output.backend_guidance import Vocabulary, enforceable, place_of
from app.engine.structured_output.grammar_builder import check_schema, json_grammar, with_any_white_space

T = TypeVar("T")

#: Size of the caches of checked grammars and schemas.
_NUM_CHECKED = 256
#: Adapters' added tokens, and what is known about them, in memory.
_NUM_OWN = 32
#: Requests with more characters or token ids are processed in a thread.
MAX_INLINE_CHARS = 20_000


def open_tokenizer_service(config: AppConfig) -> TokenizerService:
    """The tokenizer service of the configured base model. Raises SourceError, CheckpointError."""
    checkpoint = open_model(config.model.uri, config.model.name, config.engine.arithmetic)
    has_memory = checkpoint.spec.encoder is None
    kv_tokens = has_memory * config.engine.num_kv_blocks * config.engine.block_size
    positions = checkpoint.spec.max_positions
    max_model_len = min(config.engine.max_model_len or positions, kv_tokens or positions)  # 0 blocks: as many as fit
    tokenizer, split = load_tokenizer(checkpoint.tokenizer_source), config.model.split_special_tokens
    return TokenizerService(tokenizer, checkpoint.spec, max_model_len, split_special_tokens=split)


class TokenizerService:
    """One per ingress process. `max_model_len` is the longest prompt plus answer that engines accept."""

    def __init__(
        self, tokenizer: Tokenizer, spec: ModelSpec, max_model_len: int, *, split_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._split_special_tokens = split_special_tokens
        self._templates = ChatTemplateSandbox()
        self._lock = threading.Lock()  # never held while a grammar is compiled, which may take a second
        self._vocabulary: Vocabulary | None = None
        self._checked: dict[str, None] = {}  # valid grammars, oldest first
        self._enforceable: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {}  # by schema, oldest first
        self._own: dict[str, TokenizerService] = {}  # by added tokens, oldest first
        #: See `SamplingParams.grammar_tokens`.
        self.grammar_tokens = ""
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.max_model_len = max_model_len

    def of_adapter(self, text: str) -> TokenizerService:
        """The service with an adapter's added tokens; itself for an adapter without. text: see `AdapterCard.text`.
        Takes a millisecond for new ones; thread-safe."""
        key = _grammar_tokens(text)
        if not key:
            return self
        with self._lock:
            found = self._own.get(key)
            if found is None:
                found = copy.copy(self)
                found._tokenizer = self._tokenizer.with_tokens(cached_adapter_tokenizer(text).added_tokens)
                found.grammar_tokens = key
                found.vocab_size = cached_adapter_tokenizer(text).vocab_size or self.vocab_size
                found._lock, found._vocabulary, found._checked, found._enforceable = threading.Lock(), None, {}, {}
                _remember(self._own, key, found, _NUM_OWN)
        return found

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, max_tokens=self.max_model_len)

    def encode_pair(self, first: str, second: str) -> Sequence[int]:
        """Token ids of two texts of a request; their special tokens are plain text if so configured."""
        allow = not self._split_special_tokens
        return self._tokenizer.encode_pair(first, second, allow_special=allow, max_tokens=self.max_model_len)

    def encode_answer(self, text: str) -> Sequence[int]:
        """Token ids of a text as it occurs in an answer: no BOS, no special tokens."""
        return self._tokenizer.encode(
            text, add_special_tokens=False, allow_special=False, max_tokens=self.max_model_len
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tenant_id: str = "",
    ) -> Sequence[int]:
        """Token ids of a conversation up to the assistant's turn, by the model's template or the adapter's own.

        text: the adapter's own chat text (`AdapterCard.text`); its template may take up to `ChatTemplateSandbox`'s time
        limit. extra: more template variables. continue_final_message: up to the end of the last message's content.
        tenant_id: whose request it is.
        """
        return encode_chat(
            self._tokenizer,
            messages,
            cached_adapter_tokenizer(text),
            self._templates,
            tools,
            extra,
            self.max_model_len,
            tenant_id,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            split_special_tokens=self._split_special_tokens,
        )

    def tool_format(self, text: str = "") -> ToolCallFormat:
        """The format of tool calls, recognized by the model's template or the adapter's own. Raises InvalidRequest."""
        return tool_format(tool_template(self._tokenizer, cached_adapter_tokenizer(text)))

    def specials(self, form: ToolCallFormat) -> Mapping[str, int]:
        """The special tokens among a call format's fixed texts, with their ids."""
        ids = {text: self._tokenizer.token_id(text) for text in fixed_texts(form)}
        return {text: i for text, i in ids.items() if i is not None and i in self._tokenizer.special_ids}

    def specials_in(self, texts: Sequence[str]) -> Mapping[int, str]:
        """The special tokens that texts contain, id → text."""
        return {} if not texts else self._tokenizer.specials_in(texts)

    def grammar_ends(self, eos_token_ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The ends of an adapter that also end an answer with a grammar: special tokens, because the grammar may need
        any other inside the answer. None: the model's."""
        return tuple(token_id for token_id in eos_token_ids or () if token_id in self._tokenizer.special_ids) or None

    def check_grammar(self, requested: RequestedGrammar) -> None:
        """Raises InvalidRequest, with the place, for a grammar that no engine can follow. Takes milliseconds;
        thread-safe."""
        with self._lock:
            vocabulary = self._open_vocabulary()
            is_checked = requested.grammar in self._checked
        if not is_checked:
            self._check_grammar(requested, vocabulary)
        if requested.prefix and (complaint := vocabulary.complaint_about_prefix(requested.grammar, requested.prefix)):
            raise InvalidRequest(
                f"the last message is not the beginning of an answer that {requested.place} allows: {complaint}",
                param="messages",
            )

    def _check_grammar(self, requested: RequestedGrammar, vocabulary: Vocabulary) -> None:
        complaint, place = vocabulary.complaint(requested.grammar), requested.place
        for path, schema in requested.schemas if complaint else ():
            if vocabulary.complaint(json_grammar(schema, path, lenient=requested.is_lenient)):
                pointer, reason = place_of(schema, path, vocabulary, lenient=requested.is_lenient)
                place, complaint = path, f"at {pointer}: {reason}"
                break
        if complaint:
            raise InvalidRequest(f"{place}: {complaint}", param=place)
        with self._lock:
            _remember(self._checked, requested.grammar, None, _NUM_CHECKED)

    def continuation(self, requested: RequestedGrammar, prefix: str) -> RequestedGrammar:
        """The grammar of an answer that begins with `prefix`. JSON in the prefix may have any white space; the rest
        then may, too. `check_grammar` reports a prefix that does not fit. Takes milliseconds; thread-safe."""
        if not prefix:
            return requested
        with self._lock:
            vocabulary = self._open_vocabulary()
        is_accepted = not vocabulary.complaint_about_prefix(requested.grammar, prefix)
        grammar = requested.grammar if is_accepted else with_any_white_space(requested.grammar)
        return requested._replace(grammar=grammar, prefix=prefix)

    def enforceable(self, schema: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The part of a schema that can be enforced, and the rest as "place#/pointer". Thread-safe."""
        check_schema(schema, place)
        key = json.dumps(schema)
        with self._lock:
            found, vocabulary = self._enforceable.get(key), self._open_vocabulary()
        if found is None:
            found = enforceable(schema, place, vocabulary)
            with self._lock:
                _remember(self._enforceable, key, found, _NUM_CHECKED)
        return found[0], tuple(f"{place}{pointer}" for pointer in found[1])

    def _open_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            spec = self.spec
            self._vocabulary = Vocabulary(self._tokenizer.to_json(), self.vocab_size, spec.eos_token_ids)
        return self._vocabulary

    def decoder(self, shown: frozenset[int] = frozenset(), *, continues: bool = False) -> Decoder:
        """A decoder for one answer. `continues`: it continues a text, so its first token keeps its space."""
        decoder = self._tokenizer.incremental_decoder(shown=shown)
        if continues:
            decoder.push(self.encode_answer("a"))
        return decoder

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer; none for a special token."""
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)


@lru_cache(_NUM_CHECKED)
def _grammar_tokens(text: str) -> str:
    """See `SamplingParams.grammar_tokens`. text: see `AdapterCard.text`."""
    return cached_adapter_tokenizer(text).vocabulary.to_json()


def _remember(cache: dict[str, T], key: str, value: T, most: int) -> None:
    """Add to a cache of `most` entries, the oldest first."""
    cache[key] = value
    if len(cache) > most:
        del cache[next(iter(cache))]


async def in_worker_if_long(length: int, work: Callable[[], T]) -> T:
    """The result of `work`, in a thread if it has more than `MAX_INLINE_CHARS` characters or token ids to process."""
    return await asyncio.to_thread(work) if length > MAX_INLINE_CHARS else work()
