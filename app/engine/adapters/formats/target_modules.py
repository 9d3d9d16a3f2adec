"""Checks a PEFT file against its configuration: which modules and parameters should be there, and are they?

An error names the first tensor that PEFT would silently drop, or silently leave at its initial value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.engine.adapters.formats.patterns import NAME_END, PATTERN, first_matches, full_matches
from app.engine.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME, PeftTensors
from app.engine.adapters.modules import OUTER_MODULES, Module
from app.engine.adapters.raw_adapter import RawTensor
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch

#: PEFT's `layers_pattern`, and what stands for it.
_LAYERS = rf"(?:^|.*?\.){PATTERN}\.(?P<idx>\d+)\."
_ANY_LAYERS = r".*?\.[^.]*\.(?P<idx>\d+)\."
_OUTER_WEIGHTS = frozenset(f"{path}.weight" for path in OUTER_MODULES)


def check_modules(
    config: PeftConfig, found: PeftTensors, table: Mapping[str, Module], base: str, *, has_experts: bool = False
) -> None:
    """The modules that the configuration selects must be those in the file.

    has_experts: whether `target_parameters` selects more than these modules.
    """
    pairs = found.modules
    fused = {target for path in pairs if path in table for target in table[path].targets if table[path].is_fused}
    candidates = [path for path, module in table.items() if module.is_fused == bool(fused.intersection(module.targets))]
    trained = {found.names.name_in_training(path): path for path in (*candidates, *OUTER_MODULES)}
    selected = {trained[name] for name in _select_modules(config, list(trained))}
    selected = {path for path in selected if not _is_inside_saved(config, path)}  # whose names are this server's
    selected |= {path for path in candidates if matches_entry(f"{path}.weight", config.target_parameters)}
    selected |= set(config.tied_modules)
    surplus = sorted(set(pairs) - selected)
    if surplus:
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: module '{surplus[0]}' is not selected by target_modules {short(config.target_modules)}; "
            "PEFT would drop it in silence"
        )
    if not selected and not has_experts:
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
    for part, key, expected in (("magnitude", "use_dora", config.use_dora), ("bias", "lora_bias", config.lora_bias)):
        for path, parts in pairs.items():
            if (part in parts) != expected:
                fault = "has no" if expected else "has a"
                raise AdapterFormatError(
                    f"{WEIGHTS_NAME}: module '{path}' {fault} {part} but '{key}' is {str(expected).lower()}"
                )
            if expected and path in OUTER_MODULES:
                raise AdapterFormatError(f"{CONFIG_NAME}: '{key}' on '{path}' is not served; train it without")


def check_target_parameters(config: PeftConfig, table: Mapping[str, Module], base: str) -> None:
    """AdapterMismatch for a name in `target_parameters` that the base lacks and PEFT would ignore."""
    names = {f"{path}.weight" for path in table}
    names |= {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in {module.layer for module in table.values() if module.expert is not None}
        for name in ("gate_up_proj", "down_proj")
    }
    for target in config.target_parameters:
        if not any(matches_entry(name, (target,)) for name in names):
            raise AdapterMismatch(f"{CONFIG_NAME}: target_parameters names {short(target)}, which {base} does not have")


def check_parameters(config: PeftConfig, found: PeftTensors, base_names: Iterable[str] | None) -> None:
    """The whole parameters in the file must be those that `bias` and `modules_to_save` select.

    Embedding and lm_head weights are optional (`save_embedding_layers`, and beside a LoRA on them). base_names: every
    tensor of the base, or None if the base is unknown.
    """
    for path, _ in found.wrapped.items():
        module, _, kind = path.rpartition(".")
        allowed = module in OUTER_MODULES if kind == "weight" else config.bias != "none"
        if module not in found.modules or not allowed:
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: tensor '{module}.base_layer.{kind}' is not selected by the configuration"
            )
    for name in sorted({*found.originals, *found.twins}):
        if not _is_saved(config, name.rpartition(".")[0]):
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: {short(name)} is stored twice, but modules_to_save does not name it"
            )
    for path in found.row_bases:
        if path not in found.token_rows:
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: '{path}.token_adapter.base_layer.weight' comes without its trained rows"
            )
    present = {*found.parameters, *(name for name in found.wrapped if name.endswith(".bias"))}
    candidates = {*(present if base_names is None else base_names), "lm_head.weight"}
    expected = {name for name in candidates if _is_trained(config, name, found)}
    for name in sorted(present - expected - _OUTER_WEIGHTS):
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: tensor {short(name)} is not selected by bias or modules_to_save, or does not exist "
            "in the base; name its module in modules_to_save if it is meant"
        )
    for name in sorted(expected - present):
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: tensor '{name}' is selected by bias or modules_to_save but is not there; "
            "the file is incomplete"
        )


def whole_matrices(config: PeftConfig, found: PeftTensors, is_tied: bool | None) -> dict[str, RawTensor]:
    """Embedding and lm_head matrices in the file that replace the base's, by name.

    PEFT loads them over the base's own, which are one matrix if the base is tied (`is_tied` None: unknown). For a
    module in modules_to_save the trained copy counts, at its own end only.
    """
    trained = {path for path in OUTER_MODULES if _is_saved(config, path)}
    free = [path for path in OUTER_MODULES if path not in trained and path not in found.modules]
    over = {path: found.parameters[f"{path}.weight"] for path in free if f"{path}.weight" in found.parameters}
    over |= found.row_bases
    found_all = list(over.values())
    if is_tied is not False:
        found_all += [found.originals[f"{path}.weight"] for path in trained if f"{path}.weight" in found.originals]
    if is_tied is None and found_all and len(over) < len(free):
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: '{next(iter(over), 'original_module')}' is saved whole, and what that means depends on "
            "whether the base's two ends are one; name the base with --base"
        )
    if is_tied and found_all:
        if any(one.data != found_all[0].data or one.dtype != found_all[0].dtype for one in found_all):
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: {' and '.join(_OUTER_WEIGHTS)} are one matrix in this base, but the file holds two "
                "that differ; save the adapter without save_embedding_layers"
            )
        over = dict.fromkeys(free, found_all[0])
    return {f"{path}.weight": tensor for path, tensor in over.items()}


def token_row_paths(config: PeftConfig, found: PeftTensors, is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Module path → token ids, for exactly the rows in the file. On a tied model lm_head shares the embedding's."""
    expected = {}
    for name, token_ids in config.token_indices.items():
        path = next((path for path in OUTER_MODULES if matches_entry(path, (name,))), None)
        if path is None:
            raise AdapterFormatError(f"{CONFIG_NAME}: trainable_token_indices names {short(name)}, not an embedding")
        expected[path] = token_ids
    rows = dict(found.token_rows)
    if is_tied and expected.get("lm_head") == expected.get("model.embed_tokens") and "lm_head" not in rows:
        expected.pop("lm_head", None)
    if is_tied and "lm_head" not in expected and _are_equal(rows.get("lm_head"), rows.get("model.embed_tokens")):
        del rows["lm_head"]  # the same rows under their second name
    for path in sorted(set(expected) ^ set(rows)):
        fault = "asks for rows that are missing" if path in expected else "does not ask for the rows"
        raise AdapterFormatError(f"trainable_token_indices {fault}: '{path}.token_adapter.trainable_tokens_delta'")
    return expected


def _is_trained(config: PeftConfig, name: str, found: PeftTensors) -> bool:
    module, _, kind = name.rpartition(".")
    if kind == "bias" and (config.bias == "all" or (config.bias == "lora_only" and module in found.modules)):
        return True
    return _is_saved(config, module)


def _is_saved(config: PeftConfig, module: str) -> bool:
    """Whether modules_to_save names the module or one that contains it."""
    parts = module.split(".")
    ancestors = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(path.endswith(saved) for path in ancestors for saved in config.modules_to_save)


def _are_equal(one: RawTensor | None, other: RawTensor | None) -> bool:
    return one is not None and other is not None and (one.dtype, one.data) == (other.dtype, other.data)


def _select_modules(config: PeftConfig, names: Sequence[str]) -> list[str]:
    """The names that PEFT would adapt (`check_target_module_exists`)."""
    exclude, targets = config.exclude_modules, config.target_modules
    if isinstance(exclude, str):
        excluded = full_matches(exclude, names, "exclude_modules")
    else:
        excluded = [matches_entry(name, exclude) for name in names]
    names = [name for name, out in zip(names, excluded, strict=True) if not out]
    names = [name for name in names if not _is_inside_saved(config, name)]
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return [name for name in names if not matches_entry(name, ("embed_tokens", "lm_head"))]
        matches = full_matches(targets, names, "target_modules")
        return [name for name, matched in zip(names, matches, strict=True) if matched]
    matched = [name for name in names if name in targets or matches_entry(name, targets)]
    if config.layers_to_transform is None:
        return matched
    # A fully named module is selected whatever layers_to_transform says, as in PEFT.
    indices = zip(matched, _layer_indices(config, matched), strict=True)
    return [name for name, index in indices if name in targets or index in config.layers_to_transform]


def _is_inside_saved(config: PeftConfig, name: str) -> bool:
    """Whether `modules_to_save` has the module whole, which therefore has no LoRA."""
    return any(f".{saved}." in f".{name}." for saved in config.modules_to_save)


def _layer_indices(config: PeftConfig, names: Sequence[str]) -> list[int | None]:
    """Per name, the layer that `layers_to_transform` looks at."""
    if config.layers_pattern:
        found = first_matches(config.layers_pattern, names, "layers_pattern", template=_LAYERS)
    else:
        found = first_matches([_ANY_LAYERS], names, "layers_to_transform")
    return [None if match is None or match[1] is None else int(match[1]) for match in found]


def first_matching(patterns: Sequence[str], names: Sequence[str], key: str) -> dict[str, str]:
    """Per name, the first of `patterns` that equals it or matches its end after a dot; names without one are absent.

    PEFT's `get_pattern_key`: `re.match(rf"(.*\\.)?({pattern})$", name)`.
    """
    found = first_matches(patterns, names, key, template=NAME_END)
    chosen = {name: patterns[match[0]] for name, match in zip(names, found, strict=True) if match is not None}
    return {name: name for name in names if name in patterns} | chosen


def matches_entry(name: str, entries: Sequence[str]) -> bool:
    """PEFT's rule for a list of names: equal, or equal to the end after a dot."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)
