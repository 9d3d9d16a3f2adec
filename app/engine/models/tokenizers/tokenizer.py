"""Text to token ids and back, for one base model.

The source is a GGUF file or a folder with tokenizer.json. Ids are transformers' for the same files, also where
transformers rebuilds parts of the tokenizer (`hf_tokenizer_classes`). Text that spells a special token becomes that
token only if the caller allows it.
"""

from __future__ import annotations

import copy
import re
import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders

from app.engine.errors import AdapterMismatch, CheckpointError, ContextOverflow, InvalidRequest
from app.engine.models.chat.chat_template import ChatTemplate
from app.engine.models.chat.user_text import UserText, user_ranges
from app.engine.models.gguf.gguf_file import read_gguf
from app.engine.models.tokenizers.gguf_tokenizer import byte_of_char, gguf_token_id, tokenizer_from_gguf
from app.engine.models.tokenizers.hf_tokenizer import read_tokenizer_folder
from app.engine.models.tokenizers.incremental_detokenizer import ByteDecoder, IncrementalDetokenizer, WindowDecoder

#: What a tokenizer.json says about an added token.
TOKEN_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
_GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
#: A few milliseconds of work; below this, threads cost more than they save.
_LONG_CHARS = 4096
#: A longer text is counted in pieces first: reading it as a whole takes up to 400 bytes of memory per character.
_MAX_UNCOUNTED_CHARS, _PIECE_CHARS = 131_072, 32_768


class NewToken(NamedTuple):
    """A token of an adapter's tokenizer that is matched as a whole; `flags` are those of `TOKEN_FLAGS` that are
    true."""

    token_id: int
    flags: tuple[str, ...]


class Tokenizer:
    """Immutable after construction; threads may share it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]
    ) -> None:
        """special_tokens: name → text. chat_templates: "default" is the usual one, "tool_use" the one with tools."""
        self._backend = backend
        self._literal = _sharing(backend)
        self._literal.encode_special_tokens = True
        self.special_tokens = dict(special_tokens)
        self._find_specials()
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self._templates = {name: ChatTemplate(source, special_tokens) for name, source in chat_templates.items()}
        #: One more than the largest id, added tokens included.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._token_bytes = _token_bytes(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None
        self._byte_ids = _byte_ids(backend)
        #: The most characters that one token stands for.
        self.max_token_chars = max(map(len, self._token_bytes or backend.get_vocab(with_added_tokens=True)))

    def _find_specials(self) -> None:
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        specials = {token.content: token_id for token_id, token in added.items() if token.special and token.content}
        self._special_texts = specials
        self._special_pattern = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")

    def with_tokens(self, tokens: Mapping[str, NewToken]) -> Tokenizer:
        """The tokenizer with more added tokens, by text; itself without any. Both share the vocabulary, so it takes a
        millisecond. Raises AdapterMismatch for a token that gets another id, as in transformers: ids are given in order
        and leave none out.
        """
        if not tokens:
            return self
        made = copy.copy(self)
        made.__dict__.pop("_marking", None)
        made._backend = _sharing(self._backend)
        in_order = sorted(tokens.items(), key=lambda item: item[1].token_id)
        made._backend.add_tokens(
            [tokenizers.AddedToken(text, **{flag: flag in own.flags for flag in TOKEN_FLAGS}) for text, own in in_order]
        )
        for text, own in in_order:
            found = made._backend.token_to_id(text)
            if found != own.token_id:
                raise AdapterMismatch(
                    f"the adapter's tokenizer has the token {text[:80]!r} as id {own.token_id}, but added to the "
                    f"base's it gets {found}; was the adapter trained with another tokenizer?"
                )
        made._literal = _sharing(made._backend)
        made._literal.encode_special_tokens = True
        made._find_specials()
        made.vocab_size = max(self.vocab_size, in_order[-1][1].token_id + 1)
        made.max_token_chars = max(self.max_token_chars, *map(len, tokens))
        if self._token_bytes is not None:
            alphabet, more = byte_of_char(), made.vocab_size - len(self._token_bytes)
            made._token_bytes = [*self._token_bytes, *[b""] * more]
            for text, own in in_order:
                made._token_bytes[own.token_id] = _bytes_of(text, alphabet)
            made.max_token_chars = max(made.max_token_chars, *(len(text.encode()) for text in tokens))
        return made

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        allow_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model's post-processor adds (such as a bos).

        With `allow_special` False, "<|im_end|>" and the like are read as plain characters. Raises InvalidRequest, and
        ContextOverflow for a text of more than `max_tokens` of the longest token, without tokenizing it, and for one of
        clearly more tokens than `max_tokens` and 131,072, after as much of it as shows that.
        """
        self._check_chars(text, max_tokens)
        backend = self._backend if allow_special else self._literal
        return _ids(backend, text, max_tokens, add_special_tokens=add_special_tokens)

    def encode_pair(
        self, first: str, second: str, *, allow_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of two texts, joined and framed by the model's post-processor. Raises what `encode` does."""
        self._check_chars(first + second, max_tokens)
        backend = self._backend if allow_special else self._literal
        if max_tokens is not None and len(first) + len(second) > _MAX_UNCOUNTED_CHARS:
            _check_num_tokens(backend, first + second, max(max_tokens, _MAX_UNCOUNTED_CHARS))
        (encoding,) = backend.encode_batch_fast([(first, second)])
        return list(encoding.ids)

    def encode_prompt(self, prompt: UserText, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a chat template's prompt. Only special tokens that the template has written become such tokens;
        those with a character of the request are plain text. Raises what `encode` does.
        """
        self._check_chars(prompt, max_tokens)
        own = self._own_specials(prompt)
        if own is not None:
            token_ids = _ids(self._backend, prompt, max_tokens, add_special_tokens=False)
            # A tokenizer whose normalizer makes special tokens from other characters finds more of them.
            if self._backend.encode_special_tokens or sum(map(self.special_ids.__contains__, token_ids)) <= own:
                return token_ids
        return self._marking.encode(prompt, max_tokens)

    def _check_chars(self, text: str, max_tokens: int | None) -> None:
        """Raises ContextOverflow for a text of more than `max_tokens` of the longest token, and InvalidRequest."""
        if max_tokens is not None and len(text) > max_tokens * self.max_token_chars:
            raise ContextOverflow(
                f"the text has {len(text)} characters, and the context holds {max_tokens} tokens of at most "
                f"{self.max_token_chars} characters; shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has a lone surrogate at index {error.start}; send valid Unicode") from None

    def _own_specials(self, prompt: UserText) -> int | None:
        """The number of special tokens in a prompt, or None if the request has written a character of one."""
        count, ranges = 0, user_ranges(prompt)
        for found in self._special_pattern.finditer(prompt):
            if _touches(ranges, *found.span()):
                return None
            count += 1
        return count

    @cached_property
    def _marking(self) -> _MarkedTokenizer:
        return _MarkedTokenizer(self._backend, self._special_texts, self._special_pattern)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary become nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))

    def incremental_decoder(
        self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """A decoder for one stream. `shown`: special tokens that are not skipped."""
        hidden = self.special_ids - shown if skip_special else frozenset[int]()
        if self._token_bytes is not None:
            return ByteDecoder(self._token_bytes, hidden)
        return WindowDecoder(lambda ids: self.decode(ids, skip_special=False), hidden, self._byte_ids)

    def token_text(self, token_id: int) -> str:
        """One token's text, as in a logprobs entry; U+FFFD if it is part of a character."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes; for decoders that are not byte-level, its text's bytes."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""
        return self.token_text(token_id).encode()

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, added tokens included."""
        return str(self._backend.to_str())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> UserText:
        """The prompt of a conversation, for `encode_prompt`; `fields` as in `ChatTemplate.render`."""
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return template.render(messages, tools=tools, **fields)

    @property
    def chat_template(self) -> str | None:
        """Source of the default template."""
        return self._templates["default"].source if "default" in self._templates else None

    @property
    def tool_template(self) -> str | None:
        """Source of the template for conversations with tools."""
        found = self._templates.get("tool_use") or self._templates.get("default")
        return found.source if found is not None else None

    def specials_in(self, texts: Sequence[str]) -> dict[int, str]:
        """The special tokens that texts contain, id → text."""
        found = (match[0] for text in texts for match in self._special_pattern.finditer(text))
        return {self._special_texts[text]: text for text in found}

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"{name} {token!r} is not in the tokenizer's vocabulary")
        return int(token_id)


class _MarkedTokenizer:
    """Reads a text's special tokens as plain text, except for those that are replaced by a marker before.

    Markers are added tokens of the same kind in a copy of the tokenizer, so the text around them is read as around the
    special tokens themselves. They are random: no request can contain one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, specials: Mapping[str, int], pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._backend = _sharing(backend)
        self._backend.encode_special_tokens = True
        nonce = secrets.token_hex(8)
        self._marker_of = {text: f"\ue000{nonce}{token_id}\ue001" for text, token_id in specials.items()}
        added = backend.get_added_tokens_decoder()
        tokens = []
        for text, token_id in specials.items():
            flags = {flag: getattr(added[token_id], flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens.append(tokenizers.AddedToken(self._marker_of[text], special=False, **flags))
        self._backend.add_tokens(tokens)
        ids = {text: self._backend.token_to_id(marker) for text, marker in self._marker_of.items()}
        self._special_of = {ids[text]: token_id for text, token_id in specials.items()}

    def encode(self, prompt: UserText, max_tokens: int | None) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        ranges, pieces, position, start = user_ranges(prompt), list[str](), 0, 0
        while (found := self._pattern.search(prompt, start)) is not None:
            if _touches(ranges, *found.span()):
                start = found.start() + 1
                continue
            pieces += (prompt[position : found.start()], self._marker_of[found[0]])
            position = start = found.end()
        text = "".join([*pieces, prompt[position:]])
        token_ids = _ids(self._backend, text, max_tokens, add_special_tokens=False)
        return [self._special_of.get(token_id, token_id) for token_id in token_ids]


def _sharing(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that may get more added tokens; both share the vocabulary and everything else."""
    made = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(backend, part)) is not None:
            setattr(made, part, found)
    made.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    made.encode_special_tokens = backend.encode_special_tokens
    return made


def _ids(backend: tokenizers.Tokenizer, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises what `_check_num_tokens` does."""
    if max_tokens is not None and len(text) > _MAX_UNCOUNTED_CHARS:
        _check_num_tokens(backend, text, max(max_tokens, _MAX_UNCOUNTED_CHARS))
    if len(text) <= _LONG_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    # A batch runs on the library's threads and releases the GIL; `encode` does not.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _touches(ranges: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether a sorted range has a character from `start` to `end`."""
    index = bisect_left(ranges, start, key=lambda each: each[1] - 1)  # the first that ends after `start`
    return index < len(ranges) and ranges[index][0] < end


def _check_num_tokens(backend: tokenizers.Tokenizer, text: str, max_tokens: int) -> None:
    """Raises ContextOverflow once the pieces of a text have more tokens than allowed.

    A text has fewer tokens than its pieces together, by a few for each cut, which the margin covers.
    """
    num_tokens = 0
    for start in range(0, len(text), _PIECE_CHARS):
        (encoding,) = backend.encode_batch_fast([text[start : start + _PIECE_CHARS]], add_special_tokens=False)
        num_tokens += len(encoding)
        if num_tokens > max_tokens + max_tokens // 16:
            raise ContextOverflow(
                f"the text has more than {max_tokens} tokens in its first {start + _PIECE_CHARS} of {len(text)} "
                "characters; shorten it"
            )


def load_tokenizer(source: Path | str) -> Tokenizer:
    """CheckpointError names what is missing or not supported."""
    source = Path(source)
    return Tokenizer(*read_tokenizer_folder(source)) if source.is_dir() else _from_gguf(source)


def _from_gguf(path: Path) -> Tokenizer:
    file = read_gguf(path)
    backend = tokenizer_from_gguf(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, key in _GGUF_SPECIAL.items():
        token_id = gguf_token_id(file, key)
        if token_id is not None:
            special[name] = tokens[token_id]
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, special, {} if template is None else {"default": template})


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Each id's bytes; a token outside the byte alphabet stands for its own text."""
    alphabet = byte_of_char()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocab.values(), default=-1))
    # An added token that the normaliser changes is decoded as its changed form.
    added = {str(backend.id_to_token(index)): index for index in backend.get_added_tokens_decoder()}
    for token, index in (*vocab.items(), *added.items()):
        table[index] = _bytes_of(token, alphabet)
    return table


def _bytes_of(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The tokens that decode to one byte each; none without ByteFallback."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return frozenset()
    found = (backend.token_to_id(spelled % byte) for byte in range(256) for spelled in ("<0x%02X>", "<0x%02x>"))
    return frozenset(token_id for token_id in found if token_id is not None)
