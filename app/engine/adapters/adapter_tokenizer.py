"""An adapter's own chat template and special tokens, from the tokenizer files beside its weights.

The files are untrusted: reads are bounded and checked, and a template must parse. `adapter_chat` decides what differs
from the base's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.engine.adapters.limits import ReadLimits, open_plain_file, read_bounded, reading
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError, AdapterTooLarge, CheckpointError

#: Tokenizer files that trainers save beside an adapter; other files in the folder are ignored.
SMALL_TEXT_FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEXT_FILES = (*SMALL_TEXT_FILES, "tokenizer.json")
_ADDED = '"added_tokens":'
#: tokenizer.json begins with its added tokens; its vocabulary and merges are not read.
_HEAD_BYTES = 8 << 20


class AdapterTokenizer(NamedTuple):
    """chat_template: Jinja source or None. special_tokens: name → text ("eos_token" → "<|im_end|>"; "" for null).
    added_tokens: text → id of tokens that are matched as a whole.
    """

    chat_template: str | None
    special_tokens: Mapping[str, str]
    added_tokens: Mapping[str, int]

    def to_json(self) -> str:
        """JSON, or "" if there is nothing to say."""
        return json.dumps(self._asdict(), sort_keys=True) if any(self) else ""

    @classmethod
    def from_json(cls, text: str) -> AdapterTokenizer:
        """The opposite of `to_json`. Raises AdapterFormatError."""
        if not text:
            return cls(None, {}, {})
        found = parse_object(text.encode(), "the adapter's text")
        template, special, added = (found.get(name) for name in cls._fields)
        if (
            set(found) != set(cls._fields)
            or not isinstance(template, str | None)
            or not (isinstance(special, dict) and all(isinstance(token, str) for token in special.values()))
            or not (isinstance(added, dict) and all(type(token_id) is int for token_id in added.values()))
        ):
            raise AdapterFormatError(f"the adapter's text is {short(text)}; write it with `polylora convert`")
        return cls(template, special, added)


def read_adapter_tokenizer(folder: Path, limits: ReadLimits) -> AdapterTokenizer:
    """What the files in `folder` say; empty if there are none. Raises AdapterFormatError, AdapterTooLarge."""
    config = _object(folder / "tokenizer_config.json", limits)
    older = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json", limits)
    special = {
        key: token
        for key, value in (config | older).items()
        if key.endswith("_token") and (token := _token_text(value)) is not None
    }
    added = dict(_object(folder / "added_tokens.json", limits))
    listed = config.get("added_tokens_decoder") or {}
    entries = [
        *(_decoder_entries(listed) if isinstance(listed, dict) else [listed]),
        *_leading_added_tokens(folder / "tokenizer.json", limits),
    ]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise AdapterFormatError(
                f"an added token of the adapter's tokenizer is {short(entry)}, without its content"
            )
        added[entry["content"]] = entry.get("id")
    for text, token_id in added.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise AdapterFormatError(
                f"the adapter's tokenizer has {short(text)} as {short(token_id)}, which is no token id"
            )
    return AdapterTokenizer(_read_template(folder, config, limits), special, added)


def write_adapter_tokenizer(folder: Path, text: AdapterTokenizer) -> None:
    """Write files that `read_adapter_tokenizer` reads back."""
    if text.chat_template is not None:
        (folder / "chat_template.jinja").write_text(text.chat_template, encoding="utf-8")
    if text.special_tokens or text.added_tokens:
        special = {name: token or None for name, token in text.special_tokens.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2, sort_keys=True) + "\n")
        (folder / "added_tokens.json").write_text(json.dumps(text.added_tokens, indent=2, sort_keys=True) + "\n")


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
    with reading(path), open_plain_file(path) as file:
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
