"""Names of an adapter's tensors, without what wrappers put around the base's own module names.

Trainers wrap models: PEFT (`base_model.model.`, once for each wrap), multimodal models (`language_model.`), compilation
(`_orig_mod.`), data parallelism (`module.`), sharding (`_fsdp_wrapped_module.`). A name is read from the part that
every model has (`layers.3.…`, `lm_head`); what precedes it must be the same for all tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

PREFIX = "base_model.model."
#: Path segments that only a wrapper has, anywhere in a name.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_INNER = r"layers\.\d+\.|embed_tokens\.|norm\."
_OUTER = r"encoder\.layer\.\d+\.|pooler\.|lm_head\."
_NAME = re.compile(rf"(?P<prefix>(?:[\w-]+\.)*?)(?:(?P<inner>(?:{_INNER}).+)|(?P<outer>(?:{_OUTER}).+))")
#: Parts of multimodal and draft models whose layers are not the language model's.
_OTHER_PARTS = re.compile(r"vis|image|audio|speech|tower|encoder|projector|talker|draft|mtp", re.IGNORECASE)
#: A tensor's name with its adapter's in it; without one, `name` is "weight" or "bias".
_ADAPTER = re.compile(
    r"(?P<part>\.lora_(?:[AB]|embedding_[AB]|magnitude_vector(?=.+\.weight$)))\.(?P<name>[^.]+)(?=\.(?:weight|bias)$|$)"
)


class TensorNames(NamedTuple):
    """plain: a tensor's name in the file → its name in PEFT's plain form, without "base_model.model.". prefix: what the
    trained model had in place of a decoder's "model."; outer_prefix: what it had before other modules' names.
    """

    plain: Mapping[str, str]
    prefix: str
    outer_prefix: str

    def name_in_training(self, path: str) -> str:
        """The name that a module of the base had when the adapter was trained: the configuration is about these."""
        if path.startswith("model."):
            return self.prefix + path.removeprefix("model.")
        return self.outer_prefix + path

    def name_here(self, name: str) -> str:
        """The opposite, for a name in the configuration that may be a full one."""
        if self.prefix and name.startswith(self.prefix):
            return f"model.{name.removeprefix(self.prefix)}"
        return name.removeprefix(self.outer_prefix)


def plain_names(names: Iterable[str]) -> TensorNames:
    """Raises AdapterFormatError, with the candidates and a key for each, if no single mapping fits all names."""
    unwrapped = {full: _WRAPPERS.sub("", full) for full in names}
    adapters = {match["name"]: full for full, name in unwrapped.items() if (match := _ADAPTER.search(name))}
    has_nameless = any(adapters.pop(name, None) for name in ("weight", "bias"))
    if len(adapters) > 1:
        raise AdapterFormatError(
            f"the file holds {len(adapters)} adapters, {_examples(adapters)}; save one of them alone"
        )
    plain: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    outer_prefixes: dict[str, str] = {}
    for full, name in unwrapped.items():
        match = _ADAPTER.search(name)
        if match and match["name"] in adapters and (not has_nameless or match["name"] == "default"):
            name = _ADAPTER.sub(match["part"], name)  # noqa: PLW2901
        while name.startswith(PREFIX):
            name = name.removeprefix(PREFIX)  # noqa: PLW2901
        match = _NAME.fullmatch(name)
        if match is None or _OTHER_PARTS.search(match["prefix"]):
            plain[full] = name
            continue
        plain[full] = match["outer"] or f"model.{match['inner']}"
        (prefixes if match["inner"] else outer_prefixes).setdefault(match["prefix"], full)
    for found in (prefixes, outer_prefixes):
        if len(found) > 1:
            raise AdapterFormatError(
                f"the tensors' names begin in {len(found)} ways, {_examples(found)}, and no single one fits them all; "
                "save the adapter of the language model alone, with PEFT's save_pretrained"
            )
    seen: dict[str, str] = {}
    for full, name in plain.items():
        if name in seen:
            raise AdapterFormatError(
                f"{short(name)} is there twice, as {short(seen[name])} and {short(full)}; keep one"
            )
        seen[name] = full
    return TensorNames(plain, next(iter(prefixes), "model."), next(iter(outer_prefixes), ""))


def _examples(found: Mapping[str, str]) -> str:
    return ", ".join(f"{short(name)} (as in {short(full)})" for name, full in list(found.items())[:5])
