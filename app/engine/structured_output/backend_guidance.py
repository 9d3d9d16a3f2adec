"""Structured output with llguidance: which tokens may come next, over the vocabulary of the base model or an adapter.

Grammars are texts from `grammar_builder`; the result is one bit per token. The bits depend on the grammar and on the
sequence's own tokens alone; a grammar that exceeds a limit ends its own sequence.
"""

from __future__ import annotations

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer
from app.engine.constraint import EndTokens, GrammarMatcher, why
from app.engine.errors import InvalidRequest
from app.engine.models.tokenizers.tokenizer import TOKEN_FLAGS
from app.engine.structured_output.grammar_builder import MAX_GRAMMAR_CHARS, below, json_grammar, subschemas

#: llguidance counts fuel: about 50,000 per millisecond for compiling, 14,000 per millisecond (20,000 items) for a mask.
#: A grammar that is made to be slow thus ends after some milliseconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=60_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
#: The compiled grammars kept, and their characters altogether; each takes some twenty bytes per character.
_NUM_KEPT, _MAX_KEPT_CHARS = 64, 64 * MAX_GRAMMAR_CHARS
#: Vocabularies with adapters' added tokens that are kept.
_NUM_OWN = 8
#: The list of added tokens in a tokenizer.json: a token of this name is followed by a number.
_ADDED_TOKENS = re.compile(r'"added_tokens":\s*(?=\[)')
#: Schemas that are compiled to find what cannot be enforced in one: at each place, altogether, and their characters.
_MAX_TRIES, _MAX_TOTAL_TRIES, _MAX_TRIED_CHARS = 100, 400, 2 << 20
#: What may have a < in a Lark grammar: a text, a regular expression, a comment, or (matched last) a token's name. What
#: has no end matches, too: otherwise the search would begin again at each of its quotes.
_LARK_NAME = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?://|#)[^\n]*|<[^\s<>]+>')
#: Parts of a schema that are left out at most, before it is reported as invalid.
_MAX_REMOVED = 20
#: Keywords that are wrong, not unknown, if a grammar is invalid because of them.
_ESSENTIAL = frozenset({"type", "properties", "required", "items", "enum", "const", "$ref"})
#: How llguidance's warnings about a lenient schema begin; a list in JSON follows, or the schema's own text.
_UNIMPLEMENTED, _UNKNOWN_FORMAT = "Unimplemented keys: ", "Unknown format: "


class Vocabulary:
    """The tokens that a model may draw. One thread at a time calls `matcher`; any thread computes masks and checks
    grammars."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes about a fifth of a second for 50,000 tokens."""
        self._vocab_size = vocab_size
        match = _ADDED_TOKENS.search(tokenizer_json)
        assert match is not None, "the tokenizers library always writes them"
        self._added_tokens, end = json.JSONDecoder().raw_decode(tokenizer_json, match.end())
        self._around_added = tokenizer_json[: match.end()], tokenizer_json[end:]  # parsing all of it takes 0.3 s
        self._own: OrderedDict[str, Vocabulary] = OrderedDict()  # by added tokens
        self._eos_token_ids = tuple(eos_token_ids)
        tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        # llguidance takes every added token of the form <...> for a special one.
        plain = {
            token["content"]: token["id"]
            for token in self._added_tokens
            if not token["special"] and token["content"].startswith("<") and token["content"].endswith(">")
        }
        self._by_id = {name: f"<[{token_id}]>" for name, token_id in plain.items()}
        if plain:
            wrapper = TokenizerWrapper(_PlainTokens(tokenizer, frozenset(plain.values())))
            tokenizer = LLTokenizer(wrapper, eos_token=list(eos_token_ids))
        self._tokenizer = tokenizer.with_slices(LLTokenizer.json_slices())
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._num_chars = 0  # of their grammars
        self.num_words = -(-vocab_size // 32)

    def with_tokens(self, text: str) -> Vocabulary:
        """The vocabulary with an adapter's added tokens; itself for "". text: see `SamplingParams.grammar_tokens`.
        Takes as long as a new one, unless the same tokens are kept. One thread at a time. Raises AdapterFormatError."""
        if not text:
            return self
        if text not in self._own:
            added = cached_adapter_tokenizer(text)
            tokens = self._added_tokens + [
                {"id": own.token_id, "content": token, **{flag: flag in own.flags for flag in TOKEN_FLAGS}}
                for token, own in sorted(added.added_tokens.items(), key=lambda item: item[1].token_id)
            ]
            tokenizer_json = json.dumps(tokens).join(self._around_added)
            self._own[text] = Vocabulary(tokenizer_json, added.vocab_size or self._vocab_size, self._eos_token_ids)
            if len(self._own) > _NUM_OWN:
                self._own.popitem(last=False)
        self._own.move_to_end(text)
        return self._own[text]

    def matcher(
        self, grammar: str, tenant_id: str, prefix: str = "", eos_token_ids: Sequence[int] | None = None
    ) -> GrammarMatcher:
        """A matcher at the beginning of an answer, or behind `prefix`. Compiled grammars are kept for a tenant's next
        request. eos_token_ids: the tokens that end this answer; None: the vocabulary's own.

        Raises InvalidRequest.
        """
        key = (tenant_id, grammar)
        found = self._compiled.get(key)
        if found is None:
            found = LLMatcher(self._tokenizer, self._with_ids(grammar), log_level=0, limits=_LIMITS)
            if found.is_error():
                raise InvalidRequest(why(found.get_error()))
            self._compiled[key] = found
            self._num_chars += len(grammar)
            while len(self._compiled) > _NUM_KEPT or self._num_chars > _MAX_KEPT_CHARS:
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._num_chars -= len(oldest)
        self._compiled.move_to_end(key)
        ends = None if eos_token_ids is None else EndTokens(self._eos_token_ids, tuple(eos_token_ids))
        # A fresh copy: llguidance's limits count per matcher.
        matcher = GrammarMatcher(found.deep_copy(), self.num_words, ends)
        if prefix:
            matcher.consume(self._tokenizer.greedy_tokenize(prefix))
        return matcher

    def complaint(self, grammar: str) -> str:
        """Why this grammar cannot be used; empty if it can."""
        named = self._with_ids(grammar)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(named, self._tokenizer, limits=_LIMITS)
        return why(messages[0]) if is_error else ""

    def complaint_about_prefix(self, grammar: str, prefix: str) -> str:
        """Why no answer of a valid grammar begins with this text; empty if one does."""
        compiled = LLMatcher(self._tokenizer, self._with_ids(grammar), log_level=0, limits=_LIMITS)
        matcher = GrammarMatcher(compiled, self.num_words)
        try:
            matcher.consume(self._tokenizer.greedy_tokenize(prefix))
        except InvalidRequest as error:
            return str(error)
        return ""

    def unknown_keywords(self, grammar: str) -> frozenset[str]:
        """The keywords, and the values of `format`, of a lenient JSON grammar that are not enforced."""
        _, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer, limits=_LIMITS)
        found: set[str] = set()
        for message in messages:
            if message.startswith(_UNIMPLEMENTED):
                found.update(json.loads(message.removeprefix(_UNIMPLEMENTED)))
            elif message.startswith(_UNKNOWN_FORMAT):
                found.add(message.removeprefix(_UNKNOWN_FORMAT))
        return frozenset(found)

    def _with_ids(self, grammar: str) -> str:
        """The grammar with ids in place of plain tokens' names, <[117]> for <call>: llguidance knows special tokens'
        names only. Texts, regular expressions and comments, and so JSON, stay."""
        if not self._by_id:
            return grammar
        return _LARK_NAME.sub(lambda found: self._by_id.get(found[0], found[0]), grammar)


class _PlainTokens:
    """What llguidance's `TokenizerWrapper` reads of a tokenizer: the same one, with some special tokens as text."""

    def __init__(self, tokenizer: LLTokenizer, plain: frozenset[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token, None
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special_token(i) and i not in plain]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.tokenize_bytes(text))


def enforceable(
    schema: Mapping[str, Any], place: str, vocabulary: Vocabulary
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The part of a schema that a lenient grammar can enforce, and the JSON pointers of the rest.

    The rest are keywords that llguidance does not know, and those that make the grammar invalid, such as a pattern with
    look-around. If the schema is invalid for another reason it is returned with that part: the caller reports it. The
    same holds for one that takes more than `_MAX_TOTAL_TRIES` or `_MAX_TRIED_CHARS`.
    """
    kept = copy.deepcopy(dict(schema))
    removed: list[str] = []
    checks = _Checks(vocabulary, place, lenient=True)
    while len(removed) < _MAX_REMOVED and checks.complaint(kept):
        pointer, _ = _place_of(kept, checks)
        parent, keyword = _parent_of(kept, pointer)
        if parent is None or keyword in _ESSENTIAL:
            return kept, ()
        del parent[keyword]
        removed.append(pointer)
    unknown = vocabulary.unknown_keywords(json_grammar(kept, place, lenient=True))
    below_it: list[tuple[str, Mapping[str, Any]]] = [("#", kept)]
    for pointer, one in below_it if unknown else ():
        removed += [
            below(pointer, key) for key in one if key in unknown or (key == "format" and str(one[key]) in unknown)
        ]
        below_it += subschemas(one, pointer)
    return kept, tuple(removed)


def _parent_of(schema: dict[str, Any], pointer: str) -> tuple[dict[str, Any] | None, str]:
    """The object that contains a pointer's value, and its key there; None for the schema itself or a list's item."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] or [""]
    value: Any = schema
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return (value, last) if isinstance(value, dict) and last in value else (None, last)


def place_of(
    schema: Mapping[str, Any], place: str, vocabulary: Vocabulary, *, lenient: bool = False
) -> tuple[str, str]:
    """The JSON pointer of the part of a schema that cannot be enforced, and the reason.

    It is the innermost schema that cannot be enforced by itself, and in it the keyword without which it could be.
    Checks at most `_MAX_TRIES` schemas.
    """
    return _place_of(schema, _Checks(vocabulary, place, lenient=lenient))


class _Checks:
    """Compiles schemas to learn whether they can be enforced, until that has taken too much."""

    def __init__(self, vocabulary: Vocabulary, place: str, *, lenient: bool) -> None:
        self._vocabulary, self._place, self._lenient = vocabulary, place, lenient
        self._tries_left, self._chars_left = _MAX_TOTAL_TRIES, _MAX_TRIED_CHARS

    def complaint(self, schema: Mapping[str, Any]) -> str:
        """Why this schema cannot be enforced; empty if it can, or if this has taken too much before."""
        if self._tries_left <= 0 or self._chars_left <= 0:
            return ""
        grammar = json_grammar(schema, self._place, lenient=self._lenient)
        self._tries_left -= 1
        self._chars_left -= len(grammar)
        return self._vocabulary.complaint(grammar)


def _place_of(schema: Mapping[str, Any], checks: _Checks) -> tuple[str, str]:
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    tries_left = _MAX_TRIES

    def complaint(candidate: Mapping[str, Any]) -> str:
        nonlocal tries_left
        tries_left -= 1
        return checks.complaint({**definitions, **candidate}) if tries_left >= 0 else ""

    pointer, innermost, reason = "#", schema, checks.complaint(schema)
    while True:
        for inner, candidate in subschemas(innermost, pointer):
            if found := complaint(candidate):
                pointer, innermost, reason = inner, candidate, found
                break
        else:
            break
    for keyword in innermost if tries_left >= len(innermost) else ():
        if not complaint({name: value for name, value in innermost.items() if name != keyword}):
            return below(pointer, keyword), reason
    return pointer, reason
