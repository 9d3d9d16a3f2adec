"""A Hugging Face folder's tokenizer, assembled from up to five files as transformers does it.

These are tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json and config.json, plus chat
templates. A token that only one of the files has is added in transformers' order, so it gets transformers' id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, processors

from app.engine.errors import CheckpointError
from app.engine.models.hf.safetensors_folder import read_json
from app.engine.models.tokenizers.hf_tokenizer_classes import CLASSES, PLAIN, rebuild_tokenizer, tokenizer_class

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"


class FolderTokenizer(NamedTuple):
    """special_tokens: name → text ("bos_token" → "<s>"). chat_templates: name → source; "default" is the usual one."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


class _Tokens(NamedTuple):
    """listed: id → token. named: name → token. extra: special tokens without a name."""

    listed: dict[int, AddedToken]
    named: dict[str, AddedToken | str]
    extra: list[AddedToken | str]


def read_tokenizer_folder(folder: Path) -> FolderTokenizer:
    """CheckpointError names what is missing or not supported."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save the model with its fast tokenizer")
    try:
        text = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    config, model_config = _optional(folder / _CONFIG), _optional(folder / "config.json")
    content = json.loads(text)
    name = tokenizer_class(config, model_config, '"ByteLevel"' in text)
    tokens = _tokens(folder, config, content, name)
    if name != PLAIN:
        backend = rebuild_tokenizer(name, content, backend, config | tokens.named)
    backend.no_truncation()
    backend.no_padding()
    _add(backend, tokens, name)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    special = {key: str(token) for key, token in tokens.named.items()}
    if name != PLAIN:
        _wrap(backend, special, CLASSES[name].before, CLASSES[name].behind)
    return FolderTokenizer(backend, special, _templates(folder, config))


def _wrap(backend: tokenizers.Tokenizer, special: Mapping[str, str], before: str | None, behind: str | None) -> None:
    """Put the tokens with these names around every text ("": none); with neither, keep tokenizer.json's
    post-processor."""
    if before is None and behind is None:
        return
    ids = {}
    for key in filter(None, (before, behind)):
        token_id = backend.token_to_id(special[key]) if key in special else None
        if token_id is None:
            raise CheckpointError(f"{_CONFIG} has no {key}, which goes around every text of this tokenizer")
        ids[special[key]] = token_id
    pieces = [*([special[before]] if before else []), "$A", *([special[behind]] if behind else [])]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(ids.items()))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokens(folder: Path, config: Mapping[str, Any], content: Mapping[str, Any], name: str) -> _Tokens:
    """The tokens in the files beside tokenizer.json; the two older files count only if the first lists none."""
    values = dict(config)
    if values.get("additional_special_tokens") and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    if "added_tokens_decoder" in config:
        listed = _decoder_tokens(config["added_tokens_decoder"])
    else:
        values = _with_map(values, _optional(folder / "special_tokens_map.json"))
        listed = _older_added_tokens(folder, values, content)
    named = _named_tokens(values, {} if name == PLAIN else CLASSES[name].named)
    extra = values.get("extra_special_tokens") or []
    if isinstance(extra, Mapping):
        named |= {key: _token(value, key) for key, value in extra.items()}
        extra = []
    if name != PLAIN and not extra:
        extra = list(CLASSES[name].extra)
    by_text = {token.content: token for token in listed.values()}
    named = {key: by_text.get(str(token), token) for key, token in named.items()}
    return _Tokens(listed, named, [_token(token, "extra_special_tokens") for token in extra])


def _with_map(values: dict[str, Any], from_map: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated from special_tokens_map.json, whose tokens are all special."""
    found = dict(values)
    for key, value in from_map.items():
        if key == "additional_special_tokens":
            found["extra_special_tokens"] = found.get("extra_special_tokens") or value
        elif key == "extra_special_tokens" and isinstance(value, list):
            known = list(found.get(key) or [])
            found[key] = known + [token for token in value if token not in known]
        else:
            found[key] = {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value
    return found


def _named_tokens(values: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, AddedToken | str]:
    """In transformers' order; null removes a class's default."""
    found: dict[str, AddedToken | str] = {}
    keys = [*_NAMED, *(key for key in (*values, *defaults) if key.endswith("_token") and key not in _NAMED)]
    for key in dict.fromkeys(keys):
        value = values[key] if key in values else defaults.get(key)
        if isinstance(value, str | Mapping):
            found[key] = _token(value, key)
    return found


def _token(value: object, where: str) -> AddedToken | str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        flags = {flag: value[flag] for flag in _TOKEN_FLAGS if isinstance(value.get(flag), bool)}
        return AddedToken(value["content"], **flags)
    raise CheckpointError(f"{where} holds {value!r}; a token's text or an object with its content is needed")


def _decoder_tokens(entries: object) -> dict[int, AddedToken]:
    """tokenizer_config.json's `added_tokens_decoder`: id → token."""
    try:
        return {
            int(token_id): AddedToken(entry["content"], **{flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry})
            for token_id, entry in (entries or {}).items()  # type: ignore[attr-defined]
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"added_tokens_decoder in {_CONFIG} is not understood: {error!r}") from error


def _older_added_tokens(folder: Path, values: Mapping[str, Any], content: Mapping[str, Any]) -> dict[int, AddedToken]:
    """added_tokens.json (text → id), overridden by tokenizer.json's own `added_tokens`."""
    special = {str(_token(values[key], key)) for key in _NAMED if isinstance(values.get(key), str | Mapping)}
    extra = values.get("extra_special_tokens") or []
    if isinstance(extra, list):
        special |= {str(_token(token, "extra_special_tokens")) for token in extra}
    listed = {}
    for text, token_id in _optional(folder / "added_tokens.json").items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise CheckpointError(f"added_tokens.json has {text!r} as {token_id!r}; a token id is needed")
        listed[token_id] = AddedToken(text, normalized=text not in special, special=text in special)
    for entry in content.get("added_tokens") or []:
        flags = {flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry}
        listed[entry["id"]] = AddedToken(entry["content"], **flags)
    return listed


def _add(backend: tokenizers.Tokenizer, tokens: _Tokens, name: str) -> None:
    """Add what the backend lacks, in transformers' order. CheckpointError if a listed token gets another id."""
    names = {str(token) for token in tokens.named.values()}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    by_id = dict(sorted(tokens.listed.items()))
    known |= {token.content for token in by_id.values()}
    adding = list(by_id.values())
    for token in (*tokens.named.values(), *tokens.extra):
        if str(token) not in known:
            known.add(str(token))
            adding.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    for token in adding:
        if token.content in names:
            token.special = True
    backend.add_tokens(adding)
    for token_id, token in by_id.items():
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{_CONFIG} or added_tokens.json has {token.content!r} as id {token_id}, but it gets id "
                f"{backend.token_to_id(token.content)} from tokenizer.json; save the tokenizer again with transformers"
            )
    if name != PLAIN and CLASSES[name].flags_all:
        every = dict.fromkeys(str(token) for token in (*tokens.named.values(), *tokens.extra))
        backend.add_tokens([AddedToken(text, special=True) for text in every])


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates from files (chat_template.jinja, additional_chat_templates/NAME.jinja), else from the
    configuration.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"} | files
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    if template is None:
        return {}
    entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found: dict[str, str] = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(f"chat_template in {folder / _CONFIG} is {type(template).__name__}, not text")
        found[name] = text
    return found
