"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors in a folder.

In: a folder (from `resolve_adapter_path`; trusted to be a place, not to be well formed). Out: a
`LoraAdapter` that does what PEFT would do, or an error that says why not. Every key of the
configuration and every tensor is used or refused, and a module that the configuration targets must
be there: PEFT would leave it at zero in silence. Pickle is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.engine.adapters.build import build_adapter
from app.engine.adapters.limits import DEFAULT_LIMITS, ReadLimits, read_bounded
from app.engine.adapters.lora import LoraAdapter
from app.engine.adapters.modules import OUTER_MODULES, Module, layer_modules
from app.engine.adapters.patterns import first_matching, full_matches, listed
from app.engine.adapters.peft_config import CONFIG_NAME, PeftConfig, parse_config
from app.engine.adapters.safetensors_file import read_safetensors
from app.engine.adapters.stored import StoredAdapter, StoredModule, StoredTensor
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.spec import ModelSpec

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.")
HALVES = {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"}


def read_peft(folder: Path, spec: ModelSpec, limits: ReadLimits = DEFAULT_LIMITS) -> LoraAdapter:
    """The adapter in `folder`, ready to serve on `spec`. Raises an `AdapterError`."""
    return build_adapter(read_peft_stored(folder, spec, limits), spec, limits)


def read_peft_stored(folder: Path, spec: ModelSpec | None, limits: ReadLimits = DEFAULT_LIMITS) -> StoredAdapter:
    """The adapter in `folder` as saved, checked against its own configuration and the base's modules.

    Without a base, the layers that the tensors name are taken for all there are.
    """
    weights = _weights_file(folder)
    config = parse_config(read_bounded(folder / CONFIG_NAME, limits.max_config_bytes))
    pairs = _pair(read_safetensors(weights, limits))
    if spec is None:
        found = [int(match[1]) for match in map(_LAYER.match, pairs) if match]
        return _assemble(config, pairs, "a model of these layers", 1 + max(found, default=-1), limits)
    return _assemble(config, pairs, f"'{spec.name}'", len(spec.layers), limits)


def _weights_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise AdapterFormatError(f"'{folder.name}' is not a folder; an adapter is a folder as saved by PEFT")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if (folder / name).exists():
            continue
        pickles = sorted(path.name for path in folder.glob("adapter_model.*") if path.suffix in _PICKLE_SUFFIXES)
        if name == WEIGHTS_NAME and pickles:
            raise AdapterFormatError(
                f"'{folder.name}' holds {pickles[0]}, a pickle, which can run code when read; "
                "save the adapter again with safe_serialization=True"
            )
        raise AdapterFormatError(f"'{folder.name}' has no {name}; save the adapter with PEFT's save_pretrained")
    return folder / WEIGHTS_NAME


def _pair(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Module path → its halves. Every tensor must be half of a pair."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in HALVES if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(PREFIX):
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: tensor {short(name)} is not understood; "
                f"served are {PREFIX}<module>.lora_A.weight and .lora_B.weight"
            )
        path = name[len(PREFIX) : -len(suffix)]
        pairs.setdefault(path, {})[HALVES[suffix]] = tensor
    for path, halves in pairs.items():
        missing = {"lora_A", "lora_B"} - set(halves)
        if missing:
            raise AdapterFormatError(f"{WEIGHTS_NAME}: module {short(path)} has no {missing.pop()}; save it whole")
    return pairs


def _assemble(
    config: PeftConfig,
    pairs: Mapping[str, Mapping[str, StoredTensor]],
    base: str,
    num_layers: int,
    limits: ReadLimits,
) -> StoredAdapter:
    if config.rank > limits.max_rank:
        raise AdapterTooLarge(f"{CONFIG_NAME}: r is {config.rank} but at most {limits.max_rank} is read")
    table = layer_modules(num_layers)
    for path in pairs:
        if path not in table:
            raise AdapterMismatch(
                f"{WEIGHTS_NAME}: module {short(path)} does not exist in {base} ({num_layers} layers), "
                "or LoRA on it is not served"
            )
    _check_targets(config, pairs, table, base)

    paths = sorted(pairs)
    rank_keys = first_matching(list(config.rank_pattern), paths, "rank_pattern")
    alpha_keys = first_matching(list(config.alpha_pattern), paths, "alpha_pattern")
    modules = []
    for path in paths:
        a, b = pairs[path]["lora_A"], pairs[path]["lora_B"]
        rank = config.rank_pattern[rank_keys[path]] if path in rank_keys else config.rank
        alpha = config.alpha_pattern[alpha_keys[path]] if path in alpha_keys else config.alpha
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterFormatError(
                f"{path}: the configuration gives rank {rank} but lora_A is {list(a.shape)} and "
                f"lora_B {list(b.shape)}; fix r or rank_pattern"
            )
        modules.append(StoredModule(path, a, b, alpha, config.use_rslora))
    return StoredAdapter(tuple(modules))


def _check_targets(config: PeftConfig, pairs: Mapping[str, object], table: Mapping[str, Module], base: str) -> None:
    """The modules that the configuration selects and those in the file must be the same."""
    fused = {target for path in pairs for target in table[path].targets if table[path].is_fused}
    candidates = [path for path, module in table.items() if module.is_fused == bool(fused.intersection(module.targets))]
    selected = set(_selected(config, [*candidates, *OUTER_MODULES]))
    for path in OUTER_MODULES:
        if path in selected:
            raise AdapterFormatError(f"{CONFIG_NAME}: target_modules selects '{path}': LoRA on it is not served")
    extra = sorted(set(pairs) - selected)
    if extra:
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: module '{extra[0]}' is not selected by target_modules {short(config.target_modules)}; "
            "PEFT would drop it in silence"
        )
    if not selected:
        raise AdapterMismatch(
            f"{CONFIG_NAME}: target_modules {short(config.target_modules)} selects no module of {base}; "
            "the adapter was trained on another model"
        )
    missing = sorted(selected - set(pairs))
    if missing:
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: module '{missing[0]}' ({len(missing)} in all) is selected by target_modules "
            "but has no tensors; the file is incomplete"
        )


def _selected(config: PeftConfig, names: Sequence[str]) -> list[str]:
    """The names that PEFT would adapt (`check_target_module_exists`)."""
    exclude, targets = config.exclude_modules, config.target_modules
    if isinstance(exclude, str):
        excluded = full_matches(exclude, names, "exclude_modules")
    else:
        excluded = [listed(name, exclude) for name in names]
    names = [name for name, out in zip(names, excluded, strict=True) if not out]
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return [name for name in names if name not in OUTER_MODULES]
        matches = full_matches(targets, names, "target_modules")
        return [name for name, matched in zip(names, matches, strict=True) if matched]
    # A module named in full is chosen whatever layers_to_transform says: so does PEFT.
    return [name for name in names if name in targets or (listed(name, targets) and _in_layers(config, name))]


def _in_layers(config: PeftConfig, name: str) -> bool:
    """Names here are "model.layers.<i>.…": a layers_pattern other than "layers" finds no index."""
    if config.layers_to_transform is None:
        return True
    parts = name.split(".")
    if len(parts) < 4 or (config.layers_pattern and not listed("model.layers", config.layers_pattern)):
        return False
    return int(parts[2]) in config.layers_to_transform
