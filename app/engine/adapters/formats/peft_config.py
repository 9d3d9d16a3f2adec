"""PEFT's adapter_config.json, parsed strictly.

Every key is used, known to be irrelevant at inference, or refused by name: ignoring a key could serve an adapter
wrongly. `target_modules` and `peft` work out what the names in it select.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.engine.adapters.card import TRAINED_ON
from app.engine.adapters.score_head import HEAD_MODULES
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError

CONFIG_NAME = "adapter_config.json"

_INERT = """
    auto_mapping base_model_name_or_path corda_config eva_config inference_mode lora_dropout lora_ga_config
    megatron_core monteclora_config qalora_group_size revision runtime_config velora_config
"""
#: Keys that are irrelevant at inference: provenance, training and memory settings. PEFT reads those of CorDA and
#: LoRA-GA only if `init_lora_weights` says so, and leaves them in the file of a converted adapter.
INERT_KEYS = frozenset(_INERT.split())

#: The task type of adapters with a score head.
CLASSIFIES = "SEQ_CLS"

#: Initialisations that leave the base weights unchanged, so that A and B are the whole change.
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")

_CONVERT = "it changes the base weights; save with path_initial_model_for_weight_conversion"

#: Keys accepted only at the values that switch them off, and why others are refused.
OFF_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "arrow_config": ((None,), "Arrow routing is not served"),
    "enable_lora": ((None,), "merged projections are not served"),
    "init_lora_weights": ((*PLAIN_INITS, None), _CONVERT),
    "kasa_config": ((None,), "KaSA is not served"),
    "layer_replication": ((None, []), "replicated layers are not served"),
    "loftq_config": ((None, {}), _CONVERT),
    "merge_weights": ((None, False), "adapters are served unmerged"),
    "megatron_config": ((None,), "Megatron layers are not served"),
    "task_type": (
        (None, "CAUSAL_LM", "FEATURE_EXTRACTION", CLASSIFIES),
        f"only causal language models, embeddings (FEATURE_EXTRACTION) and scores of texts ({CLASSIFIES}) are served",
    ),
    "use_bdlora": ((None, False), "BD-LoRA is not served"),
    "use_qalora": ((None, False), "QALoRA is not served"),
}

_USED = """
    alora_invocation_tokens alpha_pattern bias ensure_weight_tying exclude_modules fan_in_fan_out
    layers_pattern layers_to_transform lora_alpha lora_bias modules_to_save peft_type r peft_version rank_pattern
    target_modules target_parameters trainable_token_indices use_dora use_rslora
"""
USED_KEYS = frozenset(_USED.split())


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings that decide which modules change and how. A `str` is a pattern, a tuple a list of names.

    `fan_in_fan_out` has no effect: PEFT switches it off for linear layers and refuses it with `target_parameters`.
    `peft_version` only distinguishes two layouts of experts (`peft_experts`); "" if absent. `tied_modules` are selected
    whatever the names say (`weight_tying`). has_head: its task is to score texts (`app.engine.adapters.score_head`).
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_dora: bool
    lora_bias: bool
    bias: Literal["none", "all", "lora_only"]
    modules_to_save: tuple[str, ...]
    token_indices: Mapping[str, tuple[int, ...]]
    trained_on: str | None = None  # the base's name, for messages
    target_parameters: tuple[str, ...] = ()
    fan_in_fan_out: bool = False
    peft_version: str = ""
    invocation_tokens: tuple[int, ...] = ()
    ensure_weight_tying: bool = False
    tied_modules: tuple[str, ...] = ()
    has_head: bool = False


def parse_config(contents: bytes) -> PeftConfig:
    """The configuration in `contents`. AdapterFormatError names the offending key."""
    config = parse_object(contents, CONFIG_NAME)
    if config.get("peft_type") != "LORA":
        raise _config_error("peft_type", config.get("peft_type"), "only LORA adapters are served")
    for key, value in config.items():
        if key in OFF_VALUES:
            allowed, reason = OFF_VALUES[key]
            plain = value.lower() if isinstance(value, str) and key == "init_lora_weights" else value
            if not any(type(plain) is type(one) and plain == one for one in allowed):
                raise _config_error(key, value, reason)
        elif value is not None and key not in INERT_KEYS and key not in USED_KEYS:
            raise _config_error(
                key, value, "this key is not known, so its effect is not; update the server or remove it"
            )

    target_parameters = _names(config, "target_parameters", default=())
    if isinstance(target_parameters, str):
        raise _config_error("target_parameters", target_parameters, "must be a list of parameter names")
    target_modules = _names(config, "target_modules", default=() if target_parameters else None)
    layers_to_transform = _layers(config)
    layers_pattern = _names(config, "layers_pattern", default=())
    if isinstance(layers_pattern, str):
        layers_pattern = (layers_pattern,) if layers_pattern else ()
    if isinstance(target_modules, str) and (layers_to_transform is not None or layers_pattern):
        raise _config_error(
            "layers_to_transform", config.get("layers_to_transform"), "needs target_modules to be a list"
        )
    if layers_pattern and config.get("layers_to_transform") is None:
        raise _config_error("layers_pattern", list(layers_pattern), "means nothing without layers_to_transform")
    bias = config.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise _config_error("bias", bias, "must be none, all or lora_only")
    use_dora, lora_bias = _boolean(config, "use_dora"), _boolean(config, "lora_bias")
    if use_dora and lora_bias:
        raise _config_error("lora_bias", lora_bias, "PEFT does not combine it with use_dora")
    invocation_tokens = _invocation_tokens(config)
    trained_on = config.get(TRAINED_ON)
    return PeftConfig(
        rank=_rank("r", config.get("r", 8)),
        alpha=_alpha("lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=_boolean(config, "use_rslora"),
        target_modules=target_modules,
        exclude_modules=_names(config, "exclude_modules", default=()),
        layers_to_transform=layers_to_transform,
        layers_pattern=layers_pattern,
        rank_pattern={key: _rank(f"rank_pattern[{short(key)}]", v) for key, v in _table(config, "rank_pattern")},
        trained_on=trained_on if isinstance(trained_on, str) and trained_on else None,
        use_dora=use_dora,
        lora_bias=lora_bias,
        bias=bias,
        modules_to_save=_modules_to_save(config),
        token_indices=_token_indices(config),
        target_parameters=target_parameters,
        fan_in_fan_out=_boolean(config, "fan_in_fan_out"),
        ensure_weight_tying=_boolean(config, "ensure_weight_tying"),
        has_head=config.get("task_type") == CLASSIFIES,
        invocation_tokens=invocation_tokens,
        peft_version=config["peft_version"] if isinstance(config.get("peft_version"), str) else "",
        alpha_pattern={key: _alpha(f"alpha_pattern[{short(key)}]", v) for key, v in _table(config, "alpha_pattern")},
    )


def _config_error(key: str, value: object, reason: str) -> AdapterFormatError:
    return AdapterFormatError(f"{CONFIG_NAME}: {short(key)} is {short(value)}: {reason}")


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _config_error(key, value, "a rank is an integer of at least 1")
    return value


def _alpha(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise _config_error(key, value, "alpha is a number")
    try:
        alpha = float(value)
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise _config_error(key, value, "alpha must be finite")
    return alpha


def _boolean(config: Mapping[str, Any], key: str) -> bool:
    """null counts as false."""
    value = config.get(key)
    if value is None:
        return False
    if type(value) is not bool:
        raise _config_error(key, value, "must be true or false")
    return value


def _names(config: Mapping[str, Any], key: str, default: tuple[str, ...] | None) -> str | tuple[str, ...]:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    if isinstance(value, str):
        return value if value or default is None else default
    raise _config_error(key, value, "must be a list of module names or a pattern")


def _modules_to_save(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = _names(config, "modules_to_save", default=())
    if isinstance(names, str) or not all(name.replace(".", "_").isidentifier() for name in names):
        raise _config_error("modules_to_save", names, "must be a list of plain module names")
    return tuple(dict.fromkeys((*names, *HEAD_MODULES))) if config.get("task_type") == CLASSIFIES else names


def _token_indices(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Module name → token ids; a bare list means the input embedding, as in PEFT."""
    value = config.get("trainable_token_indices")
    if not value:
        return {}
    table = {"embed_tokens": value} if isinstance(value, list) else value
    if not isinstance(table, dict) or not all(_are_token_ids(ids) for ids in table.values()):
        raise _config_error("trainable_token_indices", value, "must be distinct token ids, alone or by module name")
    return {name: tuple(ids) for name, ids in table.items()}


def _are_token_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) and 0 < len(ids) == len(set(ids))


def _invocation_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The invocation tokens of an activated LoRA, or (). PEFT activates deltas only: anything else that is trained
    would also change the tokens before the invocation.
    """
    key = "alora_invocation_tokens"
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise _config_error(key, value, "must be a list of token ids, or null")
    unsupported = [
        name
        for name, off in (
            ("use_dora", (None, False)),
            ("bias", (None, "none")),
            ("modules_to_save", (None, [])),
            ("trainable_token_indices", (None, [], {})),
            ("target_parameters", (None, [])),
        )
        if config.get(name) not in off
    ]
    if unsupported:
        raise _config_error(key, value, f"is not served together with {' and '.join(unsupported)}")
    return tuple(value)


def _layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The selected layers; None for all, as for an empty list in PEFT."""
    value = config.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise _config_error("layers_to_transform", value, "must be layer indices from 0")
    return tuple(layers)


def _table(config: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise _config_error(key, value, "must map module names or patterns to numbers")
    return list(value.items())
