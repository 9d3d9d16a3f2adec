"""Text to token ids and back, for one base model.

In: what `Checkpoint.tokenizer_source` names, a GGUF file or a folder with tokenizer.json. Out: a
`Tokenizer` giving transformers' ids for the same files. Text that spells a special token becomes that
token only where the caller allows it. Which prompt a conversation makes is `chat`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from app.engine.errors import CheckpointError, InvalidRequest
from app.engine.models.chat import ChatTemplate
from app.engine.models.gguf_file import read_gguf
from app.engine.models.gguf_tokenizer import byte_of_char, gguf_token_id, tokenizer_from_gguf
from app.engine.models.incremental import ByteDecoder, IncrementalDecoder, WindowDecoder
from app.engine.models.safetensors_folder import read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
#: Some milliseconds of work; for less, threads cost more than they give.
_LONG_CHARS = 4096


class Tokenizer:
    """Immutable after construction; threads may share it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self._literal = tokenizers.Tokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.chat_template = ChatTemplate(chat_template, special_tokens) if chat_template is not None else None
        #: One more than the largest id, added tokens included.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._token_bytes = _token_bytes(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model's template adds (a bos, say).

        `allow_special` False reads "<|im_end|>" and the like as the characters they are.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has a lone surrogate at index {error.start}; send valid Unicode") from None
        backend = self._backend if allow_special else self._literal
        if len(text) <= _LONG_CHARS:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # As a batch, with threads of its own, it lets Python's run meanwhile; `encode` stops them all.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))

    def incremental_decoder(self, *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for one stream."""
        hidden = self.special_ids if skip_special else frozenset[int]()
        if self._token_bytes is not None:
            return ByteDecoder(self._token_bytes, hidden)
        return WindowDecoder(lambda ids: self.decode(ids, skip_special=False), hidden)

    def token_text(self, token_id: int) -> str:
        """One token's own text, as a logprobs entry shows it; U+FFFD where it is part of a character."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes; for decoders that are not byte-level, those of its text."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""
        return self.token_text(token_id).encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"{name} {token!r} is not in the tokenizer's vocabulary")
        return int(token_id)


def load_tokenizer(source: Path | str) -> Tokenizer:
    """CheckpointError names what is missing or not understood."""
    source = Path(source)
    return _from_folder(source) if source.is_dir() else _from_gguf(source)


def _from_gguf(path: Path) -> Tokenizer:
    file = read_gguf(path)
    backend = tokenizer_from_gguf(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, key in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        token_id = gguf_token_id(file, key)
        if token_id is not None:
            special[name] = tokens[token_id]
    return Tokenizer(backend, special, file.metadata.get("tokenizer.chat_template"))


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save the model with its fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    _add_listed_tokens(backend, config)
    special = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str):
            special[name] = token
    return Tokenizer(backend, special, _folder_template(folder, config))


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json has (`added_tokens_decoder`: id to token), as transformers adds them."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        tokens = {
            int(token_id): AddedToken(entry["content"], **{flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry})
            for token_id, entry in listed.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"added_tokens_decoder in tokenizer_config.json is not understood: {error!r}") from error
    for token_id, token in sorted(tokens.items()):
        if backend.token_to_id(token.content) is not None:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json has {token.content!r} as id {token_id}, but tokenizer.json lacks it and ends "
                f"before id {backend.token_to_id(token.content)}; save the tokenizer again with transformers"
            )


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja where it exists, else tokenizer_config.json's (a list has one named 'default')."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"chat_template in {folder}/tokenizer_config.json is {type(template).__name__}, not text")
    return template


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Each id's bytes; a token outside the byte alphabet stands for its own text."""
    alphabet = byte_of_char()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocab.values(), default=-1))
    for token, index in vocab.items():
        try:
            table[index] = bytes([alphabet[char] for char in token])
        except KeyError:
            table[index] = token.encode()
    return table
