"""PEFT's `ensure_weight_tying`: what is trained on the embedding of a tied base is trained on its lm_head, too.

A module saved whole stands at both ends. A LoRA of the embedding is lm_head's LoRA, transposed. Token rows are shared
with or without the option (`token_row_paths`). Where the base's ends are two matrices, or neither is in the adapter,
the option changes nothing. PEFT writes both ends into the file; a file with one of them means the same.
"""

from __future__ import annotations

from dataclasses import replace

from app.engine.adapters.formats.patterns import full_matches
from app.engine.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME, PeftTensors
from app.engine.adapters.raw_adapter import EMBEDDING_PATH, RawTensor, transpose
from app.engine.errors import AdapterFormatError

#: Last parts of the names that PEFT takes for an embedding (`EMBEDDING_LAYER_NAMES`).
_EMBEDDINGS = ("embed_tokens", "lm_head")
_ENDS = (EMBEDDING_PATH, "lm_head")


def tie_ends(config: PeftConfig, found: PeftTensors, *, is_tied: bool | None) -> PeftConfig:
    """The configuration with both ends selected where one is; `found` gains the end that the file lacks.

    is_tied: None if the base is unknown; then both ends are tied if the file has both. Raises AdapterFormatError for
    two ends that differ.
    """
    if not config.ensure_weight_tying or is_tied is False:
        return config
    rows = [ids for name, ids in config.token_indices.items() if name.rpartition(".")[2] in _EMBEDDINGS]
    if is_tied and any(ids != rows[0] for ids in rows):
        raise AdapterFormatError(
            f"{CONFIG_NAME}: ensure_weight_tying is true, but trainable_token_indices names other tokens for the "
            "embedding than for lm_head, which are one matrix in this base; train the same tokens"
        )
    if any(name.rpartition(".")[2] in _EMBEDDINGS for name in config.modules_to_save):
        weights = [f"{path}.weight" for path in _ENDS]
        if is_tied is None and not all(name in found.parameters for name in weights):
            return config
        saved = [found.parameters[name] for name in weights if name in found.parameters]
        if any(not _are_alike(one, saved[0]) for one in saved):
            raise _differ("weight")
        if saved:
            found.parameters.update(dict.fromkeys(weights, saved[0]))
        return replace(config, modules_to_save=(*config.modules_to_save, *_ENDS))
    if not _targets_an_end(config):
        return config
    pairs = [found.modules.get(path) for path in _ENDS]
    if is_tied is None and not all(pairs):
        return config
    embedding, head = pairs
    if embedding and head:
        if not _are_alike(transpose(embedding["lora_A"]), head["lora_B"]) or not _are_alike(
            transpose(embedding["lora_B"]), head["lora_A"]
        ):
            raise _differ("LoRA")
    elif one := embedding or head:
        other = {"lora_A": transpose(one["lora_B"]), "lora_B": transpose(one["lora_A"])}
        found.modules[EMBEDDING_PATH if head else "lm_head"] = other
    return replace(config, tied_modules=_ENDS)


def _targets_an_end(config: PeftConfig) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        return targets.lower() != "all-linear" and any(full_matches(targets, _EMBEDDINGS, "target_modules"))
    return any(name.rpartition(".")[2] in _EMBEDDINGS for name in targets)


def _are_alike(one: RawTensor, other: RawTensor) -> bool:
    return (one.dtype, one.shape, one.data) == (other.dtype, other.shape, other.data)


def _differ(what: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"{WEIGHTS_NAME}: ensure_weight_tying is true, but the {what} of '{EMBEDDING_PATH}' is not that of 'lm_head'; "
        "save the adapter again with PEFT, or set ensure_weight_tying to false if the two were trained apart"
    )
