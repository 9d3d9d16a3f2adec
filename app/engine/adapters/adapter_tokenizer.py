"""An adapter's own chat template, special tokens and generation defaults, from the files beside its weights.

The files are untrusted: reads are bounded and checked, and a template must parse. `adapter_chat` decides what differs
from the base's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from app.engine.adapters.bounded_files import ReadLimits, adapter_read_errors, open_plain_file, read_bounded
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError, AdapterTooLarge, CheckpointError
from app.engine.models.tokenizers.tokenizer import TOKEN_FLAGS, NewToken

GENERATION_CONFIG = "generation_config.json"
#: Files of the tokenizer and of generation that trainers save beside an adapter; other files in the folder are ignored.
SMALL_TEXT_FILES = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION_CONFIG,
)
TEXT_FILES = (*SMALL_TEXT_FILES, "tokenizer.json")
_ADDED = '"added_tokens":'
#: Special tokens that tokenizer_config.json and special_tokens_map.json list without a name each.
_UNNAMED = ("extra_special_tokens", "additional_special_tokens")
#: Fields of generation_config.json that a request has under the same name.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: tokenizer.json begins with its added tokens; its vocabulary and merges are not read.
_HEAD_BYTES = 8 << 20


class AdapterTokenizer(NamedTuple):
    """chat_template: Jinja source or None. special_tokens: name → text ("eos_token" → "<|im_end|>"; "" for null).
    added_tokens: by text, tokens that are matched as a whole. generation: the fields of generation_config.json
    that are applied (`GENERATION_FIELDS`), by transformers' names. vocab_size: see `AdapterCard`.
    """

    chat_template: str | None
    special_tokens: Mapping[str, str]
    added_tokens: Mapping[str, NewToken]
    generation: Mapping[str, Any] = MappingProxyType({})
    vocab_size: int = 0

    @property
    def changes_prompts(self) -> bool:
        """Whether a conversation is written otherwise than for the base."""
        return self.chat_template is not None or bool(self.special_tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """The ids that end an answer; None: the base's."""
        found = self.generation.get("eos_token_id")
        return None if found is None else tuple(found)

    @property
    def sampling(self) -> dict[str, Any]:
        """The generation defaults, by the names of `SamplingParams`; `do_sample: false` is greedy."""
        found = {name: self.generation[name] for name in _SAMPLING if name in self.generation}
        if "max_new_tokens" in self.generation:
            found["max_tokens"] = self.generation["max_new_tokens"]
        return found | ({"temperature": 0.0} if self.generation.get("do_sample") is False else {})

    def without_sampling(self) -> AdapterTokenizer:
        """The same with no generation defaults but the ids that end an answer."""
        kept = {name: value for name, value in self.generation.items() if name == "eos_token_id"}
        return self._replace(generation=kept)

    def to_json(self) -> str:
        """JSON, or "" if there is nothing to say."""
        fields = self._asdict() | {"generation": dict(self.generation)}
        return json.dumps(fields, sort_keys=True) if any(self) else ""

    @classmethod
    def from_json(cls, text: str) -> AdapterTokenizer:
        """The opposite of `to_json`. Raises AdapterFormatError."""
        if not text:
            return cls(None, {}, {})
        what = "metadata 'text' of the adapter's card"
        found = {"generation": {}, "vocab_size": 0} | parse_object(text.encode(), what)
        template, special, added, generation, vocab_size = (found.get(name) for name in cls._fields)
        if (
            set(found) != set(cls._fields)
            or not isinstance(template, str | None)
            or not (isinstance(special, dict) and all(isinstance(token, str) for token in special.values()))
            or not (isinstance(added, dict) and all(map(_is_token, added.values())))
            or not isinstance(generation, dict)
            or type(vocab_size) is not int
            or not 0 <= vocab_size < 2**31
        ):
            raise AdapterFormatError(
                f"{what} is {short(text)}, not the JSON of a chat template, added tokens and generation defaults; "
                "write the card with `polylora convert`"
            )
        tokens = {token: NewToken(token_id, tuple(flags)) for token, (token_id, flags) in added.items()}
        return cls(template, special, tokens, _generation(generation), vocab_size)

    @property
    def vocabulary(self) -> AdapterTokenizer:
        """Only what changes the vocabulary."""
        return AdapterTokenizer(None, {}, self.added_tokens, {}, self.vocab_size)


#: `AdapterTokenizer.from_json` for the texts of registered adapters, which every request of theirs needs; the last ones
#: are kept.
cached_adapter_tokenizer = lru_cache(256)(AdapterTokenizer.from_json)


def read_adapter_tokenizer(folder: Path, limits: ReadLimits) -> AdapterTokenizer:
    """What the files in `folder` say; empty if there are none. Raises AdapterFormatError, AdapterTooLarge."""
    config = _object(folder / "tokenizer_config.json", limits)
    older = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json", limits)
    special = {
        key: token
        for key, value in (config | older).items()
        if key.endswith("_token") and (token := _token_text(value)) is not None
    }
    added = _added_tokens(folder, config, older, set(special.values()), limits)
    generation = _generation(_object(folder / GENERATION_CONFIG, limits))
    return AdapterTokenizer(_read_template(folder, config, limits), special, added, generation)


def write_adapter_tokenizer(folder: Path, text: AdapterTokenizer) -> None:
    """Write files that `read_adapter_tokenizer` reads back."""
    if text.chat_template is not None:
        (folder / "chat_template.jinja").write_text(text.chat_template, encoding="utf-8")
    if text.special_tokens or text.added_tokens:
        special: dict[str, Any] = {name: token or None for name, token in text.special_tokens.items()}
        if text.added_tokens:
            special["added_tokens_decoder"] = {
                str(token_id): {"content": token, **{flag: flag in flags for flag in TOKEN_FLAGS}}
                for token, (token_id, flags) in text.added_tokens.items()
            }
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2, sort_keys=True) + "\n")
    if text.generation:
        (folder / GENERATION_CONFIG).write_text(json.dumps(dict(text.generation), indent=2, sort_keys=True) + "\n")


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The applied fields of a generation_config.json; null is absent, and `eos_token_id` becomes a list. Raises
    AdapterFormatError.
    """
    found: dict[str, Any] = {}
    for name, (is_valid, wanted) in GENERATION_FIELDS.items():
        value = config.get(name)
        if value is None:
            continue
        if name == "eos_token_id":
            value = list(dict.fromkeys(value)) if _is_list_of_ids(value) else [value]
        if not is_valid(value):
            raise AdapterFormatError(f"'{GENERATION_CONFIG}' has {name} {short(value)}; it must be {wanted}")
        found[name] = value
    return found


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _is_count(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < 2**31


def _is_list_of_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_EOS_TOKENS
        and all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in value)
    )


#: End-of-sequence tokens of one adapter.
MAX_EOS_TOKENS = 64
#: The fields of generation_config.json that are applied: name → (whether a value is valid, what is valid). The ranges
#: are those of a request's fields.
GENERATION_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "eos_token_id": (_is_list_of_ids, f"a token id or a list of 1 to {MAX_EOS_TOKENS}"),
        "do_sample": (lambda value: isinstance(value, bool), "true or false"),
        "temperature": (_is_number(0, 2), "a number from 0 to 2"),
        "top_p": (_is_number(0, 1), "a number from 0 to 1"),
        "top_k": (_is_count(0), "a whole number from 0 on"),
        "min_p": (_is_number(0, 1), "a number from 0 to 1"),
        "repetition_penalty": (_is_number(1e-9, 10), "a number above 0 and at most 10"),
        "max_new_tokens": (_is_count(1), "a whole number from 1 on"),
    }
)


def _object(path: Path, limits: ReadLimits) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    return parse_object(read_bounded(path, limits.max_header_bytes), f"'{path.name}'")


def _token_text(value: object) -> str | None:
    """A special token's text; "" for null, None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
        return value if isinstance(value, str) else None
    return "" if value is None else value if isinstance(value, str) else None


def _is_token(value: object) -> bool:
    """Whether this is a `NewToken` in JSON."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    token_id, flags = value
    return type(token_id) is int and isinstance(flags, list) and all(flag in TOKEN_FLAGS for flag in flags)


def _added_tokens(
    folder: Path, config: Mapping[str, Any], older: Mapping[str, Any], named: set[str], limits: ReadLimits
) -> dict[str, NewToken]:
    """The tokens that the folder's files list, as transformers reads them: tokens with a name are special. Raises
    AdapterFormatError.
    """
    unnamed = [value for key in _UNNAMED for value in (config.get(key), older.get(key)) if value]
    texts = [each for value in unnamed for each in (value.values() if isinstance(value, Mapping) else value)]
    special = named | {text for each in texts if (text := _token_text(each)) is not None}
    flagged = {True: {"special": True}, False: {"normalized": True}}
    listed = config.get("added_tokens_decoder") or {}
    entries = [
        *(
            {"content": text, "id": token_id} | flagged[text in special]
            for text, token_id in _object(folder / "added_tokens.json", limits).items()
        ),
        *(_decoder_entries(listed) if isinstance(listed, dict) else [listed]),
        *_leading_added_tokens(folder / "tokenizer.json", limits),
    ]
    added = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise AdapterFormatError(
                f"an added token of the adapter's tokenizer is {short(entry)}, without its content"
            )
        text, token_id = entry["content"], entry.get("id")
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise AdapterFormatError(
                f"the adapter's tokenizer has {short(text)} as {short(token_id)}, which is no token id"
            )
        flags = {flag for flag in TOKEN_FLAGS if entry.get(flag) is True} | ({"special"} if text in special else set())
        added[text] = NewToken(token_id, tuple(sorted(flags)))
    return added


def _decoder_entries(table: Mapping[str, Any]) -> list[Any]:
    """`added_tokens_decoder` (id → token) as entries with their ids."""
    return [
        {**entry, "id": int(token_id) if token_id.isdecimal() else token_id} if isinstance(entry, dict) else entry
        for token_id, entry in table.items()
    ]


def _leading_added_tokens(path: Path, limits: ReadLimits) -> list[Any]:
    """The added tokens at the start of a tokenizer.json; the vocabulary is not read."""
    if not os.path.lexists(path):
        return []
    with adapter_read_errors(path), open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limits.max_weight_bytes:
            raise AdapterFormatError(f"'{path.name}' has {size} bytes; is it a tokenizer?")
        head = file.read(_HEAD_BYTES).decode("utf-8", "ignore")
    start = head.find(_ADDED)
    try:
        found = json.JSONDecoder().raw_decode(head, start + len(_ADDED) + _num_blanks(head, start + len(_ADDED)))[0]
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"'{path.name}' does not begin with its added tokens: {str(error)[:200]}") from error
    if start < 0 or not isinstance(found, list):
        raise AdapterFormatError(f"'{path.name}' does not begin with its added tokens; save it with transformers")
    return found


def _num_blanks(text: str, start: int) -> int:
    return len(text[start : start + 64]) - len(text[start : start + 64].lstrip())


def _read_template(folder: Path, config: Mapping[str, Any], limits: ReadLimits) -> str | None:
    file = folder / "chat_template.jinja"
    template: object = config.get("chat_template")
    if os.path.lexists(file):
        try:
            template = read_bounded(file, limits.max_text_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise AdapterFormatError(f"'{file.name}' is not UTF-8") from error
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise AdapterFormatError(f"the adapter's chat_template is {short(template)}, not text")
    if len(template.encode(errors="replace")) > limits.max_text_bytes:
        raise AdapterTooLarge(f"the adapter's chat template has more than {limits.max_text_bytes} bytes; shorten it")
    if any("\ud800" <= char <= "\udfff" for char in template):
        raise AdapterFormatError("the adapter's chat template has half of a surrogate pair; write it as UTF-8")
    from app.engine.models.chat.chat_template import ChatTemplate  # jinja2, which few adapters need

    try:
        ChatTemplate(template, {})
    except CheckpointError as error:
        raise AdapterFormatError(f"the adapter's chat template does not parse: {error.__cause__}") from error
    return template
