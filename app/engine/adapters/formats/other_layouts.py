"""Adapters as other trainers save them, for `polylora convert`: MLX, torchtune, diffusers and kohya.

All of them are safetensors files with two low-rank matrices per module, under other names, some transposed and with
another way to write the scale. What a layout says is kept bit by bit, or an error names what is not understood.

- MLX (mlx-lm, `adapters.safetensors`): `<module>.lora_a` [d_in, r] and `.lora_b` [r, d_out], DoRA's `.m` [d_out];
  experts are [E, r, d_in] and [E, d_out, r]. The configuration has the scale.
- torchtune: `layers.0.attn.q_proj.lora_a.weight`, PEFT's matrices; the output rows of q_proj and k_proj are in the
  order of Meta's rotary embedding where torchtune uses that.
- kohya: `lora_te_layers_0_self_attn_q_proj.lora_down.weight`, `.lora_up.weight` and a scalar `.alpha`.
- diffusers: `text_encoder.layers.0.self_attn.q_proj.lora_A.weight`, or `.lora_linear_layer.down.weight` or
  `.lora.down.weight`, with alpha beside them or in the file's metadata.

Without an alpha, kohya's and diffusers' is the rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from app.engine.adapters.adapter_tokenizer import read_adapter_tokenizer
from app.engine.adapters.bounded_files import DEFAULT_LIMITS, ReadLimits, read_bounded
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.safetensors_file import read_safetensors, safetensors_metadata
from app.engine.adapters.formats.tensor_names import plain_names
from app.engine.adapters.raw_adapter import (
    EMBEDDING_PATH,
    RawAdapter,
    RawModule,
    RawTensor,
    bits_of,
    tensor_of,
    transpose,
)
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError
from app.engine.models.spec import ModelSpec

#: Suffix of a tensor's name → (layout, part).
_SUFFIXES: Mapping[str, tuple[str, str]] = {
    ".lora_a": ("mlx", "a"),
    ".lora_b": ("mlx", "b"),
    ".m": ("mlx", "magnitude"),
    ".lora_a.weight": ("torchtune", "a"),
    ".lora_b.weight": ("torchtune", "b"),
    ".magnitude": ("torchtune", "magnitude"),
    ".lora_down.weight": ("kohya", "a"),
    ".lora_up.weight": ("kohya", "b"),
    ".lora_A.weight": ("diffusers", "a"),
    ".lora_B.weight": ("diffusers", "b"),
    ".lora_linear_layer.down.weight": ("diffusers", "a"),
    ".lora_linear_layer.up.weight": ("diffusers", "b"),
    ".lora.down.weight": ("diffusers", "a"),
    ".lora.up.weight": ("diffusers", "b"),
    ".alpha": ("", "alpha"),
}
#: torchtune's module names → the base's.
_TORCHTUNE = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
#: Model families → whether torchtune computes rotary embeddings as Meta does, on pairs of neighbours.
_IS_META_ROPE = {"llama": True, "mistral": True, "qwen2": False, "qwen3": False}
_KOHYA = re.compile(r"lora_(?:te\d?_|lm_)?(?:(?:language_)?model_)*(?:layers_(\d+)_(self_attn|mlp)_(\w+)|(lm_head))")
_COMPONENT = re.compile(r"(text_encoder(?:_\d)?|language_model|transformer|unet)\.")


class _Tensors(NamedTuple):
    """Path → part ("a", "b", "magnitude", "alpha") → tensor, in one layout."""

    layout: str
    modules: Mapping[str, Mapping[str, RawTensor]]
    component: str = ""


def weights_of(path: Path) -> Path | None:
    """The weights of an adapter in another layout than PEFT's: the file itself, or a folder's only safetensors file.
    None if there is none."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        named = [file for file in files if file.name == "adapters.safetensors"]  # MLX keeps checkpoints beside it
        return (named or files)[0] if len(named or files) == 1 else None
    return path if path.suffix == ".safetensors" else None


def read_other_layout(weights: Path, spec: ModelSpec | None, limits: ReadLimits = DEFAULT_LIMITS) -> RawAdapter:
    """The adapter as PEFT would have it. `spec`: the base model, which torchtune's layout and MLX's embeddings need.

    Raises AdapterFormatError.
    """
    found = _sort(read_safetensors(weights, limits), weights.name)
    config_file = weights.parent / CONFIG_NAME
    config: Mapping[str, Any] = {}
    if config_file.exists():
        config = parse_object(read_bounded(config_file, limits.max_config_bytes), CONFIG_NAME)
    modules: list[RawModule] = []
    match found.layout:
        case "mlx":
            scale = _mlx_scale(config)
            for path, parts in found.modules.items():
                modules += _mlx_modules(path, parts, scale, spec)
        case "torchtune":
            alpha_of = _torchtune_alpha(config)
            for path, parts in found.modules.items():
                modules.append(_module(path, _in_our_rows(path, parts, spec), alpha_of))
        case _:
            alpha_of, use_rslora = _diffusers_alpha(weights, found.component, limits)
            modules += [
                replace(_module(path, parts, alpha_of), use_rslora=use_rslora) for path, parts in found.modules.items()
            ]
    text = read_adapter_tokenizer(weights.parent, limits).to_json()
    return RawAdapter(tuple(sorted(modules, key=lambda module: module.path)), text=text)


def _sort(tensors: Mapping[str, RawTensor], what: str) -> _Tensors:
    """Sort every tensor. Raises AdapterFormatError for a name that is in no layout, or names of several."""
    named: dict[str, tuple[str, str]] = {}
    layouts: dict[str, str] = {}
    for name in tensors:
        suffix = max((each for each in _SUFFIXES if name.endswith(each)), key=len, default=None)
        if suffix is None:
            raise AdapterFormatError(f"'{what}': tensor {short(name)} is in no layout that polylora convert reads")
        layout, part = _SUFFIXES[suffix]
        named[name] = (name.removesuffix(suffix), part)
        if layout:
            layouts.setdefault(layout, name)
    if len(layouts) != 1:
        seen = ", ".join(f"{layout} ({short(name)})" for layout, name in layouts.items()) or "none"
        raise AdapterFormatError(f"'{what}': the tensors' names are those of several layouts or of none: {seen}")
    layout = next(iter(layouts))
    paths = sorted({path for path, _ in named.values()})
    components = {match[1] if (match := _COMPONENT.match(path)) else "" for path in paths}
    if layout == "diffusers" and len(components) > 1:
        raise AdapterFormatError(
            f"'{what}' adapts several models, {', '.join(map(short, sorted(components)))}; save the language model's "
            "alone"
        )
    renamed = _base_paths(layout, paths, what)
    modules: dict[str, dict[str, RawTensor]] = {}
    for name, (path, part) in named.items():
        parts = modules.setdefault(renamed[path], {})
        if part in parts:
            raise AdapterFormatError(f"'{what}': {short(path)} has two of {short(name)}")
        parts[part] = tensors[name]
    for path, parts in modules.items():
        if not {"a", "b"} <= set(parts):
            raise AdapterFormatError(f"'{what}': {short(path)} lacks one of its two matrices; save it whole")
    return _Tensors(layout, modules, next(iter(components)) if layout == "diffusers" else "")


def _base_paths(layout: str, paths: list[str], what: str) -> Mapping[str, str]:
    """A layout's module names → the base's."""
    if layout == "torchtune":
        return {path: _torchtune_path(path, what) for path in paths}
    dotted = {path: path for path in paths}
    if layout == "kohya":
        dotted = {path: _kohya_path(path, what) for path in paths}
    elif layout == "diffusers":
        dotted = {path: path[match.end() :] if (match := _COMPONENT.match(path)) else path for path in paths}
    plain = plain_names(f"{path}.weight" for path in dotted.values()).plain
    return {path: plain[f"{name}.weight"].removesuffix(".weight") for path, name in dotted.items()}


def _torchtune_path(path: str, what: str) -> str:
    if path == "output":
        return "lm_head"
    head, _, name = path.partition(".")
    layer, _, module = name.partition(".")
    if head != "layers" or not layer.isdecimal() or module not in _TORCHTUNE:
        raise AdapterFormatError(f"'{what}': {short(path)} is no module of torchtune's language models")
    return f"model.layers.{layer}.{_TORCHTUNE[module]}"


def _kohya_path(path: str, what: str) -> str:
    match = _KOHYA.fullmatch(path)
    if match is None:
        raise AdapterFormatError(
            f"'{what}': {short(path)} is no module of a language model; kohya's files of image models are not read"
        )
    return match[4] or f"model.layers.{match[1]}.{match[2]}.{match[3]}"


def _module(path: str, parts: Mapping[str, RawTensor], alpha_of: Callable[[int], float]) -> RawModule:
    """A module with PEFT's matrices. alpha_of: rank → alpha, where the file has none beside the matrices."""
    a, b, alpha = parts["a"], parts["b"], parts.get("alpha")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterFormatError(f"{short(path)}: {list(a.shape)} and {list(b.shape)} are not [r, in] and [out, r]")
    if path == EMBEDDING_PATH:
        raise AdapterFormatError(f"{short(path)}: a LoRA on the embedding is not read from this layout")
    value = alpha_of(a.shape[0]) if alpha is None else float(alpha.to_float32().reshape(-1)[0])
    return RawModule(path, a, b, value, use_rslora=False, magnitude=parts.get("magnitude"))


def _mlx_scale(config: Mapping[str, Any]) -> Callable[[int], float]:
    """Rank → the factor of the product. Before mlx-lm 0.19 it was scale times alpha over the rank."""
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, Mapping) else None
    alpha = parameters.get("alpha") if isinstance(parameters, Mapping) else None
    if config.get("fine_tune_type", "lora") not in ("lora", "dora") or not _is_number(scale):
        raise AdapterFormatError(
            f"{CONFIG_NAME} must have fine_tune_type lora or dora and lora_parameters with a scale, as mlx-lm writes "
            "them"
        )
    assert isinstance(scale, int | float), "checked"
    if alpha is None:
        return lambda rank: float(scale)  # noqa: ARG005
    if not _is_number(alpha):
        raise AdapterFormatError(f"{CONFIG_NAME}: lora_parameters.alpha is {short(alpha)}, not a number")
    return lambda rank: scale * alpha / rank


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _mlx_modules(
    path: str, parts: Mapping[str, RawTensor], scale: Callable[[int], float], spec: ModelSpec | None
) -> list[RawModule]:
    a, b, magnitude = parts["a"], parts["b"], parts.get("magnitude")
    if len(a.shape) == len(b.shape) == 3 and a.shape[0] == b.shape[0] and ".switch_mlp." in path:
        alpha_of = lambda rank: scale(rank) * rank  # noqa: E731
        place, _, name = path.partition(".switch_mlp.")
        return [
            _module(f"{place}.experts.{expert}.{name}", {"a": _part(a, expert), "b": _part(b, expert)}, alpha_of)
            for expert in range(a.shape[0])
        ]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise AdapterFormatError(f"{short(path)}: {list(a.shape)} and {list(b.shape)} are not [in, r] and [r, out]")
    rank = a.shape[1]
    module = RawModule(path, transpose(a), transpose(b), scale(rank) * rank, use_rslora=False, magnitude=magnitude)
    if path != EMBEDDING_PATH:
        return [module]
    if spec is None:
        raise AdapterFormatError("a LoRA on MLX's embedding also changes a tied output; name the base with --base")
    # The product of a tied matrix is also the output's: logits gain scale * (x @ lora_b.T) @ lora_a.T.
    return [module, replace(module, path="lm_head", a=b, b=a)] if spec.tie_embeddings else [module]


def _torchtune_alpha(config: Mapping[str, Any]) -> Callable[[int], float]:
    alpha = config.get("lora_alpha")
    if not _is_number(alpha):
        raise AdapterFormatError(f"{CONFIG_NAME} with torchtune's lora_alpha must lie beside the weights")
    return lambda rank: float(alpha)  # type: ignore[arg-type]  # noqa: ARG005


def _in_our_rows(path: str, parts: Mapping[str, RawTensor], spec: ModelSpec | None) -> Mapping[str, RawTensor]:
    """The output rows of torchtune's q_proj and k_proj in the order of transformers' rotary embedding."""
    if not path.endswith((".q_proj", ".k_proj")):
        return parts
    if spec is None:
        raise AdapterFormatError("torchtune's rows of q_proj and k_proj depend on the model; name the base with --base")
    if spec.family not in _IS_META_ROPE:
        raise AdapterFormatError(
            f"the rows of torchtune's q_proj and k_proj are known for {', '.join(_IS_META_ROPE)}, not for {spec.family}"
        )
    if not _IS_META_ROPE[spec.family]:
        return parts
    head_dim = spec.layers[int(path.split(".")[2])].attention.head_dim
    moved = {
        name: _halves_apart(tensor, head_dim, path) for name, tensor in parts.items() if name in ("b", "magnitude")
    }
    return {**parts, **moved}


def _halves_apart(tensor: RawTensor, head_dim: int, path: str) -> RawTensor:
    """Rows [heads * head_dim, …]: each head's even ones first, then its odd ones."""
    values = bits_of(tensor)
    if len(values) % head_dim:
        raise AdapterFormatError(f"{short(path)}: {len(values)} outputs are no whole heads of {head_dim}")
    by_pair = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return tensor_of(tensor.dtype, by_pair.swapaxes(1, 2).reshape(values.shape))


def _diffusers_alpha(weights: Path, component: str, limits: ReadLimits) -> tuple[Callable[[int], float], bool]:
    """(rank → alpha of modules without their own, rsLoRA), by the configuration in the file's metadata."""
    text = safetensors_metadata(weights, limits).get("lora_adapter_metadata")
    if text is None:
        return float, False
    config = parse_object(text.encode(), f"'{weights.name}': lora_adapter_metadata")
    prefix = f"{component}." if component else ""
    alpha, patterns = config.get(f"{prefix}lora_alpha"), config.get(f"{prefix}alpha_pattern")
    if patterns or config.get(f"{prefix}use_dora") or not (alpha is None or _is_number(alpha)):
        raise AdapterFormatError(f"'{weights.name}': DoRA and alpha_pattern are not read from diffusers' layout")
    use_rslora = bool(config.get(f"{prefix}use_rslora"))
    return (float if alpha is None else lambda rank: float(alpha)), use_rslora  # noqa: ARG005


def _part(tensor: RawTensor, index: int) -> RawTensor:
    return tensor_of(tensor.dtype, bits_of(tensor)[index])
