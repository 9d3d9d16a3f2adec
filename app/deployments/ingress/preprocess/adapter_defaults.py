"""An adapter's generation defaults: the values of fields that a request leaves out.

A request's own values win over those that the registry has for the name, these over the adapter's own files
(`AdapterTokenizer.generation`), and these over the base model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from app.deployments.ingress.schemas.openai import SamplingFields
from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer

FieldsT = TypeVar("FieldsT", bound=SamplingFields)


class AdapterDefaults(NamedTuple):
    """`sampling`: values of `SamplingFields` by name. `eos_token_ids`: None for the base model's."""

    sampling: Mapping[str, Any] = {}
    max_tokens: int | None = None
    system_prompt: str | None = None
    eos_token_ids: tuple[int, ...] | None = None

    def apply(self, fields: FieldsT) -> FieldsT:
        """The fields of a request, with these values where the client has sent none."""
        missing = {name: value for name, value in self.sampling.items() if name not in fields.model_fields_set}
        return fields.model_copy(update=missing) if missing else fields


@lru_cache(256)
def adapter_defaults(text: str, registered: str) -> AdapterDefaults:
    """text: see `AdapterCard.text`. registered: the name's own defaults as JSON, or "" (`CatalogEntry.defaults`)."""
    own = cached_adapter_tokenizer(text)
    values = own.sampling | (json.loads(registered) if registered else {})
    max_tokens, system_prompt = values.pop("max_tokens", None), values.pop("system_prompt", None)
    return AdapterDefaults(values, max_tokens, system_prompt, own.eos_token_ids)
