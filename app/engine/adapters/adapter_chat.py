"""Token ids of a conversation, written with the base's chat template or with an adapter's own, and what else of an
adapter's tokenizer and generation defaults differs from the base's.

An adapter's template runs in another process (`ChatTemplateSandbox`), the base's in this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.bounded_files import DEFAULT_LIMITS
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterMismatch, AdapterTooLarge, InvalidRequest
from app.engine.models.chat.chat_template import check_variables
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.spec import ModelSpec
from app.engine.models.tokenizers.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    own: AdapterTokenizer,
    process: ChatTemplateSandbox,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    tenant_id: str = "",
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    split_special_tokens: bool = True,
) -> list[int]:
    """Token ids of the prompt, up to where the assistant's answer begins; the other fields as `ChatTemplate.render`.

    tokenizer: with the adapter's added tokens. max_tokens: see `Tokenizer.encode`. tenant_id: who is refused a template
    that takes too long. split_special_tokens: special tokens in messages and tools are plain text. Raises what these
    do, and InvalidRequest if there is no template, it refuses the messages, or a variable may not be set by a client.
    """
    special = {name: token for name, token in (tokenizer.special_tokens | dict(own.special_tokens)).items() if token}
    check_variables(extra or (), special)
    fields: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        "extra": extra,
    }
    if not own.changes_prompts:
        prompt = tokenizer.render_chat(messages, **fields)
    else:
        source = own.chat_template or (tokenizer.chat_template if tools is None else tokenizer.tool_template)
        if source is None:
            raise InvalidRequest("neither model nor adapter has a chat template; use /v1/completions", param="messages")
        prompt = process.render(source, special, messages, **fields, tenant_id=tenant_id)
    if split_special_tokens:
        return tokenizer.encode_prompt(prompt, max_tokens=max_tokens)
    return tokenizer.encode(prompt, add_special_tokens=False, max_tokens=max_tokens)


def tool_template(tokenizer: Tokenizer, own: AdapterTokenizer) -> str | None:
    """Source of the template for conversations with tools: the adapter's own, or the base's."""
    return own.chat_template or tokenizer.tool_template


class AdapterTokenizerDedup:
    """Removes from adapters' cards what equals the base's tokenizer. Thread-safe; `load` runs once, when first
    needed.
    """

    def __init__(self, load: Callable[[], Tokenizer], spec: ModelSpec) -> None:
        self._load, self._spec, self._lock = load, spec, threading.Lock()
        self._base: Tokenizer | None = None

    def strip_base(self, card: AdapterCard) -> AdapterCard:
        """The card with only what is the adapter's own. Raises AdapterMismatch (see `own_tokenizer`) and
        AdapterTooLarge."""
        if not card.text and not card.vocab_size:
            return card
        with self._lock:
            self._base = self._base or self._load()
        spec = replace(self._spec, vocab_size=card.vocab_size) if card.vocab_size else self._spec
        if card.vocab_size and card.vocab_size < self._base.vocab_size:
            raise AdapterMismatch(
                f"the adapter's embeddings have {card.vocab_size} rows, but the base's tokenizer has "
                f"{self._base.vocab_size} tokens; the adapter was trained on another model"
            )
        own = own_tokenizer(AdapterTokenizer.from_json(card.text), self._base, spec)
        text = own._replace(vocab_size=card.vocab_size).to_json()
        if len(text.encode()) > DEFAULT_LIMITS.max_text_bytes:
            raise AdapterTooLarge(
                f"the adapter's chat template and tokens have {len(text.encode())} bytes that the base model does not "
                f"have; every ingress holds them, so at most {DEFAULT_LIMITS.max_text_bytes} are served"
            )
        return replace(card, text=text)

    def strip_base_packed(self, packed: PackedAdapter) -> PackedAdapter:
        """The same for a packed adapter."""
        card = self.strip_base(packed.card)
        return packed._replace(header=packed.header | {"card": packed.header["card"] | {"text": card.text}})


def own_tokenizer(text: AdapterTokenizer, base: Tokenizer, spec: ModelSpec) -> AdapterTokenizer:
    """The parts of `text` that differ from the base's and matter to a prompt or to where an answer ends.

    The `eos_token_id` of the result are all tokens that end an answer: those of the adapter's generation_config.json,
    or else the base's; and before them the tokenizer's eos_token if it is not the base's, as transformers' trainer
    aligns a generation_config with a tokenizer. Raises AdapterMismatch for a token that the base's tokenizer has under
    another id, or that has no row in the embeddings. spec: with the adapter's own `vocab_size`.
    """
    new = {}
    for token, own in text.added_tokens.items():
        found = base.token_id(token)
        if found is not None and found != own.token_id:
            raise AdapterMismatch(
                f"the adapter's tokenizer has the token {short(token)} as id {own.token_id} and the base's has it as "
                f"{found}; train with the base's own tokenizer, or take the token out of the adapter's folder if it is "
                "not used"
            )
        if found is None and own.token_id >= spec.vocab_size:
            raise AdapterMismatch(
                f"the adapter's tokenizer has the token {short(token)} as id {own.token_id}, and the embeddings of "
                f"'{spec.name}' have {spec.vocab_size} rows; call resize_token_embeddings before training, or take "
                "the token out of the adapter's folder if it is not used"
            )
        if found is None:
            new[token] = own
    base = base.with_tokens(new)
    template = None if text.chat_template == base.chat_template else text.chat_template
    used = template or base.chat_template or ""
    special = {
        name: token
        for name, token in text.special_tokens.items()
        if name in used and token != base.special_tokens.get(name, "")
    }
    generation = {name: value for name, value in text.generation.items() if name != "eos_token_id"}
    ends = _end_ids(text, base, spec)
    if set(ends) != set(spec.eos_token_ids):
        generation["eos_token_id"] = list(ends)
    return AdapterTokenizer(template, special, new, generation)


def _end_ids(text: AdapterTokenizer, base: Tokenizer, spec: ModelSpec) -> tuple[int, ...]:
    """See `own_tokenizer`."""
    ends = list(text.generation.get("eos_token_id", spec.eos_token_ids))
    if outside := [token_id for token_id in ends if token_id >= spec.vocab_size]:
        raise AdapterMismatch(
            f"the adapter's generation_config.json ends answers with token {outside[0]}, but '{spec.name}' has "
            f"{spec.vocab_size} tokens; the adapter was trained on another model"
        )
    token = text.special_tokens.get("eos_token", "")
    if token and token != base.special_tokens.get("eos_token"):
        token_id = base.token_id(token)
        if token_id is None:
            raise AdapterMismatch(
                f"the adapter's tokenizer ends answers with {short(token)}, which is no token of the base's; train "
                "with the base's own tokenizer"
            )
        ends.insert(0, token_id)
    return tuple(dict.fromkeys(ends))
