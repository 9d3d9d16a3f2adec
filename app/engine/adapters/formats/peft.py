"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in a folder.

The folder's path is trusted (`resolve_adapter_path`), the contents are not, and links among them are refused. The
result does what PEFT would do, or an error says why not: every configuration key and every tensor is used or refused,
and a targeted module must be present, though PEFT would silently leave it at zero. Pickle files are never opened.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from app.engine.adapters.adapter_tokenizer import read_adapter_tokenizer
from app.engine.adapters.bounded_files import DEFAULT_LIMITS, ReadLimits, read_bounded
from app.engine.adapters.card import TRAINED_ON
from app.engine.adapters.formats.peft_config import CLASSIFIES, CONFIG_NAME, PeftConfig, parse_config
from app.engine.adapters.formats.peft_experts import check_options, expert_modules, is_fused, selects_parameter
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME, PeftTensors, sort_tensors
from app.engine.adapters.formats.safetensors_file import read_safetensors
from app.engine.adapters.formats.target_modules import (
    check_modules,
    check_parameters,
    check_target_parameters,
    first_matching,
    token_row_paths,
    whole_matrices,
)
from app.engine.adapters.formats.weight_tying import tie_ends
from app.engine.adapters.modules import OUTER_MODULES, UNREAD_MODULE, Module, assumed_modules, layer_modules
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor, RawTokenRows
from app.engine.adapters.score_head import HEAD_MODULES, head_names, is_head
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.hf.encoder_weight_names import LAYERS as ENCODER_LAYERS
from app.engine.models.moe_weight_layouts import canonical_module, mixtral_module
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import expected_tensors

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(\w+\.\w+)")
#: Modules whose input, or output, has the model's hidden size.
_READ_HIDDEN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_WRITE_HIDDEN = ("self_attn.o_proj", "mlp.down_proj")


def read_raw_peft(folder: Path, spec: ModelSpec | None, limits: ReadLimits = DEFAULT_LIMITS) -> RawAdapter:
    """The adapter in `folder` as saved, checked against its configuration and the base's modules.

    Without a base, the layers that the tensors name are taken as all its layers.
    """
    weights = weights_file(folder)
    config = parse_config(read_bounded(folder / CONFIG_NAME, limits.max_config_bytes))
    if config.rank > limits.max_rank:
        raise AdapterTooLarge(f"{CONFIG_NAME}: r is {config.rank} but at most {limits.max_rank} is read")
    found = sort_tensors(read_safetensors(weights, limits))
    if spec is not None:
        names = config.target_modules
        is_plain = isinstance(names, tuple) and not config.exclude_modules and not any("." in name for name in names)
        # Otherwise some layers may lack a named module.
        is_alike = all(layer.experts is None and not layer.stored for layer in spec.layers)
        is_every_layer = is_plain and is_alike and config.layers_to_transform is None
        _check_base(found.modules, spec, trained_on=config.trained_on, is_every_layer=is_every_layer)
    check_options(config)
    config = replace(
        config,
        modules_to_save=tuple(map(found.names.name_here, config.modules_to_save)),
        token_indices={found.names.name_here(name): ids for name, ids in config.token_indices.items()},
    )
    config = tie_ends(config, found, is_tied=None if spec is None else spec.tie_embeddings)
    experts = expert_modules(config, found, spec)
    for path in [path for path in found.modules if is_fused(path)]:
        del found.modules[path]
    _check(config, found, spec, has_experts=bool(experts))
    modules = sorted([*_modules(config, found), *experts], key=lambda module: module.path)
    token_ids = token_row_paths(config, found, is_tied=spec is None or spec.tie_embeddings)
    whole = whole_matrices(config, found, None if spec is None else spec.tie_embeddings)
    return RawAdapter(
        tuple(modules),
        parameters=tuple(sorted((found.parameters | found.wrapped | whole).items())),
        token_rows=tuple(RawTokenRows(path, ids, found.token_rows[path]) for path, ids in sorted(token_ids.items())),
        text=read_adapter_tokenizer(folder, limits).to_json(),
        invocation_tokens=config.invocation_tokens,
        metadata=json.dumps({TRAINED_ON: config.trained_on}) if config.trained_on else "",
    )


def weights_file(folder: Path) -> Path:
    """The weights file of a folder that has all an adapter needs. Raises AdapterFormatError; reads nothing."""
    if not folder.is_dir():
        raise AdapterFormatError(f"'{folder.name}' is not a folder; an adapter is a folder as saved by PEFT")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if os.path.lexists(folder / name):
            continue
        pickles = sorted(path.name for path in folder.glob("adapter_model.*") if path.suffix in _PICKLE_SUFFIXES)
        if name == WEIGHTS_NAME and pickles:
            raise AdapterFormatError(
                f"'{folder.name}' holds {pickles[0]}, a pickle, which can run code when read; "
                "save the adapter again with safe_serialization=True"
            )
        if name == WEIGHTS_NAME and (others := sorted(file.name for file in folder.glob("*.safetensors"))):
            raise AdapterFormatError(
                f"'{folder.name}' has {short(others[0])} instead of {name}; if MLX, torchtune, diffusers or kohya "
                "wrote it, `polylora convert` makes a PEFT folder of it"
            )
        inside = sorted((path for path in folder.glob("checkpoint-*") if (path / CONFIG_NAME).exists()), key=_step)
        hint = f"did you mean '{folder.name}/{inside[-1].name}'?" if inside else "PEFT's save_pretrained writes it"
        raise AdapterFormatError(f"'{folder.name}' has no {name}; {hint}")
    return folder / WEIGHTS_NAME


def _step(checkpoint: Path) -> tuple[int, str]:
    """Sort key of checkpoints: their step."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and len(number) < 12 else -1, checkpoint.name


def _check(config: PeftConfig, found: PeftTensors, spec: ModelSpec | None, *, has_experts: bool) -> None:
    table = assumed_modules(map(canonical_module, found.modules)) if spec is None else layer_modules(spec)
    if any(path.startswith(ENCODER_LAYERS) for path in table):
        found.modules.pop(UNREAD_MODULE, None)
        for parameters in (found.parameters, found.wrapped):
            parameters.pop(f"{UNREAD_MODULE}.bias", None)
    num_layers = len({module.layer for module in table.values()})
    base = "a model of these layers" if spec is None else f"'{spec.name}'"
    if any(".block_sparse_moe." in path for path in found.modules):
        table = {mixtral_module(path): module for path, module in table.items()}
    strange = [path for path in found.modules if path not in table and path not in OUTER_MODULES]
    if strange:
        raise AdapterMismatch(
            f"{WEIGHTS_NAME}: module {', '.join(map(short, strange[:5]))} ({len(strange)} in all) does not exist in "
            f"{base} ({num_layers} layers), or LoRA on it is not served"
        )
    candidates = _candidates(table, found)
    check_modules(config, found, candidates, base, has_experts=has_experts)
    if spec is not None:
        check_target_parameters(config, table, base)
    head = head_names(spec) if config.has_head else ()
    check_parameters(config, found, None if spec is None else (*expected_tensors(spec), *head))
    if config.has_head and not any(map(is_head, found.parameters)):
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: the task type is {CLASSIFIES} but there is no trained head "
            f"({' or '.join(HEAD_MODULES)}), so PEFT would draw a random one; save the adapter with its model"
        )


def _candidates(table: dict[str, Module], found: PeftTensors) -> dict[str, Module]:
    """The modules that `target_modules` may mean: experts and routers only if the file has them as modules.

    Since transformers 5 they are parameters, which only `target_parameters` reaches.
    """
    has_experts = any(path in table and table[path].expert is not None for path in found.modules)
    return {
        path: module
        for path, module in table.items()
        if (has_experts if module.expert is not None else module.targets != ("gate",) or path in found.modules)
    }


def _modules(config: PeftConfig, found: PeftTensors) -> list[RawModule]:
    paths = sorted(found.modules)
    # Patterns match what PEFT wraps: the module, or its weight.
    wrapped = {
        path: found.names.name_in_training(f"{path}.weight" if selects_parameter(config, f"{path}.weight") else path)
        for path in paths
    }
    rank_keys = first_matching(list(config.rank_pattern), list(wrapped.values()), "rank_pattern")
    alpha_keys = first_matching(list(config.alpha_pattern), list(wrapped.values()), "alpha_pattern")
    modules = []
    for path, name in wrapped.items():
        parts = found.modules[path]
        a, b = parts["lora_A"], parts["lora_B"]
        rank = config.rank_pattern[rank_keys[name]] if name in rank_keys else config.rank
        alpha = config.alpha_pattern[alpha_keys[name]] if name in alpha_keys else config.alpha
        if path == "lm_head" and config.tied_modules and a.shape and a.shape[0] != rank:
            # PEFT gives it the embedding's matrices, but scales by the rank that the patterns give itself.
            alpha *= math.sqrt(a.shape[0] / rank) if config.use_rslora else a.shape[0] / rank
            rank = a.shape[0]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterFormatError(
                f"{path}: the configuration gives rank {rank} but lora_A is {list(a.shape)} and "
                f"lora_B {list(b.shape)}; fix r or rank_pattern"
            )
        extra = parts.get("magnitude"), parts.get("bias")
        modules.append(RawModule(canonical_module(path), a, b, alpha, config.use_rslora, *extra))
    return modules


def _check_base(
    modules: Mapping[str, Mapping[str, RawTensor]], spec: ModelSpec, *, trained_on: str | None, is_every_layer: bool
) -> None:
    """Raise AdapterMismatch, with both models' names, widths and layers, for an adapter of another base model.

    modules: path -> part ("lora_A", "lora_B") -> tensor. is_every_layer: whether its configuration names modules and
    leaves no layer out. Only what cannot fit is refused: a different name proves nothing, since models have many
    copies.
    """
    layers: set[int] = set()
    widths: set[int] = set()
    for path, parts in modules.items():
        match = _LAYER.fullmatch(path)
        if match is None:
            continue
        layers.add(int(match[1]))
        shapes = (parts["lora_A"].shape, parts["lora_B"].shape)
        if any(len(shape) != 2 for shape in shapes):
            continue
        if match[2] in _READ_HIDDEN:
            widths.add(shapes[0][1])
        elif match[2] in _WRITE_HIDDEN:
            widths.add(shapes[1][0])
    if not layers:
        return
    num_layers, here = 1 + max(layers), len(spec.layers)
    is_whole = layers == set(range(num_layers))  # otherwise a single module is wrong, and a later check names it
    is_another_depth = is_whole and (
        num_layers > len(spec.layers) or (is_every_layer and num_layers < len(spec.layers))
    )
    is_another_width = len(widths) == 1 and widths != {spec.hidden_size}
    if not is_another_width and not is_another_depth:
        return
    lacks = ""
    if not is_another_width and num_layers < here:
        missing = f"its file has nothing for layers {num_layers} to {here - 1}"
        lacks = f", or save it again if it was trained on this one: {missing}"
    width = " or ".join(map(str, sorted(widths))) or "unknown"
    raise AdapterMismatch(
        f"the adapter was trained on {short(trained_on) if trained_on else 'another model'} (width {width}, "
        f"{'' if is_every_layer else 'at least '}{num_layers} layers), and this base is '{spec.name}' (width "
        f"{spec.hidden_size}, {here} layers); load it where the model that it was trained on is served{lacks}"
    )
