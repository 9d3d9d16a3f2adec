"""Builds the adapter that engines serve from an adapter as saved, for one base model.

Shapes are checked, every value must be finite, fused modules are split and the scale is folded into b in float32.
bfloat16 stays bfloat16 where the scale is a power of two and every product a normal number. Whatever does not fit is an
error that names the module; nothing is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import (
    BFLOAT16,
    LoraAdapter,
    LoraKey,
    LoraPair,
    Matrix,
    TokenRows,
    check_features,
    read_only,
    to_float32,
)
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.bounded_files import DEFAULT_LIMITS, ReadLimits
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.adapters.features import ENCODER_FEATURES, MAY_BE_COPIES
from app.engine.adapters.modules import OUTER_MODULES, Module, layer_modules
from app.engine.adapters.raw_adapter import EMBEDDING_PATH, RawAdapter, RawModule, RawTensor, content_digest
from app.engine.adapters.score_head import check_head, check_whole, is_head, num_labels
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.linear_modules import LATENT_B
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import expected_tensors

#: bfloat16 bit patterns: magnitude mask, number of mantissa bits, smallest normal number, infinity.
_MAGNITUDE, _MANTISSA_BITS, _NORMAL, _INFINITE = 0x7FFF, 7, 0x0080, 0x7F80
_OUTER_WEIGHTS = tuple(f"{path}.weight" for path in OUTER_MODULES)


def build_adapter(
    raw: RawAdapter,
    spec: ModelSpec,
    limits: ReadLimits = DEFAULT_LIMITS,
    supported_features: frozenset[str] = frozenset(),
) -> LoraAdapter:
    """The adapter, ready to serve. Raises AdapterMismatch, AdapterFormatError, AdapterTooLarge.

    supported_features: the `FEATURES` that the engine can apply; an adapter that needs another is refused by name.
    Embedding and output matrices may be copies of the base's, so `BaseWeightDedup` decides about those.
    """
    if not raw.modules:
        raise AdapterMismatch(f"the adapter changes no module of '{spec.name}'; was it trained on another model?")
    parts = _Parts()
    table, vocab_size = layer_modules(spec), _vocab_size(raw, spec)
    _check_invocation(raw, table, vocab_size, spec, limits)
    for module in raw.modules:
        place = table.get(module.path)
        if place is None:
            name, pair = _outer_pair(module, vocab_size, spec, limits)
            parts.outer[name] = pair
            parts.outer_scales[name] = module.scale
        else:
            parts.add(module, place, spec, limits)
    replaced, token_rows = _replaced_tensors(raw, vocab_size, spec), _token_rows(raw, spec)
    _check_appended_rows(raw, replaced, token_rows, vocab_size, spec)
    for path, place in table.items():
        if _has_deltas_only(place) and any(f"{path}.{kind}" in replaced for kind in ("weight", "bias")):
            raise AdapterFormatError(f"'{path}' is replaced as a whole, which is not served; train a LoRA on it")
        if f"{path}.weight" in replaced and place.keys[0] in parts.weights:
            raise AdapterFormatError(
                f"module '{path}' is replaced as a whole and also has a LoRA; merge the LoRA into its weight"
            )
    whole = (*replaced.values(), *(rows.rows for rows in token_rows.values()))
    adapter = LoraAdapter(
        _make_card(raw, spec, parts, whole, 0 if vocab_size == spec.vocab_size else vocab_size),
        MappingProxyType(dict(sorted(parts.weights.items(), key=lambda item: item[0].sort_key))),
        MappingProxyType(dict(sorted(parts.magnitudes.items()))),
        MappingProxyType(dict(sorted(parts.delta_biases.items()))),
        MappingProxyType(parts.outer),
        MappingProxyType(replaced),
        MappingProxyType(token_rows),
        MappingProxyType(parts.scales),
        MappingProxyType(parts.outer_scales),
    )
    check_features(
        adapter, supported_features | MAY_BE_COPIES if spec.encoder is None else supported_features & ENCODER_FEATURES
    )
    card = replace(
        adapter.card,
        extra_bytes=extra_bytes(adapter, spec),
        is_zero=adapter.is_zero,
        has_score_head=num_labels(adapter) > 0,
    )
    return replace(adapter, card=card)


def _has_deltas_only(place: Module) -> bool:
    """Whether engines apply only low-rank deltas to the module."""
    return place.expert is not None or place.targets == LATENT_B.targets


class _Parts:
    """Collects the built parts of an adapter's modules."""

    def __init__(self) -> None:
        self.weights: dict[LoraKey, LoraPair] = {}
        self.magnitudes: dict[LoraKey, NDArray[np.float32]] = {}
        self.delta_biases: dict[LoraKey, NDArray[np.float32]] = {}
        self.outer: dict[str, LoraPair] = {}
        self.scales: dict[LoraKey, float] = {}
        self.outer_scales: dict[str, float] = {}

    def add(self, module: RawModule, place: Module, spec: ModelSpec, limits: ReadLimits) -> None:
        """Add one module of a layer."""
        if _has_deltas_only(place) and (module.magnitude is not None or module.bias is not None):
            raise AdapterFormatError(f"DoRA or lora_bias on {module.path} is not served; train it without")
        d_in, d_outs = place.shape(spec)
        _check_shapes(module, d_in, d_outs, spec, limits)
        experts = spec.layers[place.layer].experts
        alternates = place.expert is not None and place.is_fused and experts is not None and experts.alternates
        pairs = _fold(module, d_outs, alternates=alternates)
        magnitude = _slices(module.magnitude, d_outs, 1.0, f"{module.path}: magnitude")
        bias = _slices(module.bias, d_outs, module.scale, f"{module.path}: lora_B.bias")
        for index, key in enumerate(place.keys):
            if key in self.weights:
                raise AdapterFormatError(
                    f"module {short(module.path)} changes {key.target} of layer {key.layer} a second time; "
                    "save it either fused or split"
                )
            self.weights[key] = pairs[index]
            self.scales[key] = module.scale
            if magnitude:
                self.magnitudes[key] = magnitude[index]
            if bias:
                self.delta_biases[key] = bias[index]


def _make_card(
    raw: RawAdapter, spec: ModelSpec, parts: _Parts, whole: tuple[NDArray[np.float32], ...], vocab_size: int
) -> AdapterCard:
    """The card; `whole` are the arrays that replace the base's."""
    arrays: list[Matrix] = [array for pair in (*parts.weights.values(), *parts.outer.values()) for array in pair]
    arrays += [*parts.magnitudes.values(), *parts.delta_biases.values(), *whole]
    return AdapterCard(
        digest=content_digest(raw, spec.digest),
        base_digest=spec.digest,
        # `outer` needs no rank rows, and experts' deltas have memory of their own.
        max_rank=max((pair.rank for key, pair in parts.weights.items() if key.expert is None), default=1),
        targets=tuple(sorted({key.target for key in parts.weights} | set(parts.outer))),
        dtype=",".join(sorted({tensor.dtype for module in raw.modules for tensor in (module.a, module.b)})),
        size_bytes=sum({id(array): array.nbytes for array in arrays}.values()),
        description=raw.description,
        text=raw.text,
        invocation_tokens=raw.invocation_tokens,
        metadata=raw.metadata,
        vocab_size=vocab_size,
    )


def _check_invocation(
    raw: RawAdapter, table: Mapping[str, Module], vocab_size: int, spec: ModelSpec, limits: ReadLimits
) -> None:
    """An activated LoRA changes linear modules only. Its invocation tokens are in the base's vocabulary, and few: every
    prompt is searched for them.
    """
    if not raw.invocation_tokens:
        return
    if len(raw.invocation_tokens) > limits.max_invocation_tokens:
        raise AdapterTooLarge(
            f"the adapter has {len(raw.invocation_tokens)} invocation tokens; at most {limits.max_invocation_tokens} "
            "are served"
        )
    largest = max(raw.invocation_tokens)
    if largest >= spec.vocab_size:
        raise AdapterMismatch(f"invocation token {largest}, but '{spec.name}' has {spec.vocab_size} tokens")
    for module in raw.modules:
        place = table.get(module.path)
        is_expert = place is not None and place.expert is not None
        if is_expert or module.path == EMBEDDING_PATH or module.magnitude is not None:
            raise AdapterFormatError(
                f"an activated LoRA on {short(module.path)} is not served: PEFT defines it for linear modules "
                "without DoRA only; train it on those"
            )
    if raw.parameters or raw.token_rows or vocab_size != spec.vocab_size:
        raise AdapterFormatError(
            "an activated LoRA with whole parameters, token rows or a resized vocabulary is not served; train it "
            "without them"
        )


def _outer_pair(module: RawModule, vocab_size: int, spec: ModelSpec, limits: ReadLimits) -> tuple[str, LoraPair]:
    shapes = {EMBEDDING_PATH: (vocab_size, spec.hidden_size), "lm_head": (spec.hidden_size, vocab_size)}
    if module.path not in shapes:
        raise AdapterMismatch(
            f"module {short(module.path)} does not exist in '{spec.name}' ({len(spec.layers)} layers); "
            "the adapter was trained on another model"
        )
    if module.magnitude is not None or module.bias is not None:
        part = "lora_bias" if module.magnitude is None else "DoRA"
        raise AdapterFormatError(f"{part} on '{module.path}' is not served; train it without")
    d_in, d_out = shapes[module.path]
    _check_shapes(module, d_in, (d_out,), spec, limits)
    a, b = _fold(module, (d_out,))[0]
    return module.path.rsplit(".", 1)[-1], LoraPair(read_only(to_float32(a)), read_only(to_float32(b)))


def _replaced_tensors(raw: RawAdapter, vocab_size: int, spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    shapes = expected_tensors(spec)
    if spec.encoder is None:
        shapes |= dict.fromkeys(_OUTER_WEIGHTS, (vocab_size, spec.hidden_size))
    parameters = dict(raw.parameters)
    wrapped = [name for name in _OUTER_WEIGHTS if name in parameters and _is_wrapped(raw, name)]
    if spec.tie_embeddings and wrapped:
        for name in _OUTER_WEIGHTS:
            parameters.setdefault(name, parameters[wrapped[-1]])
    if spec.has_gemma_arithmetic and any(name.endswith("norm.weight") for name in parameters):
        raise AdapterMismatch(f"trained norms of '{spec.name}', which multiply by 1 + w, are not served; train without")
    replaced = {}
    converted: dict[int, NDArray[np.float32]] = {}  # a matrix that replaces both ends of a tied base is stored once
    check_whole(set(parameters), spec)
    for name, tensor in parameters.items():
        if is_head(name):
            check_head(name, tensor, spec)
            replaced[name] = read_only(_finite(tensor, name))
            continue
        if tensor.shape != shapes.get(name):
            raise AdapterMismatch(
                f"{short(name)} is {list(tensor.shape)} but '{spec.name}' has {list(shapes.get(name, ()))}; "
                "the adapter was trained on another model"
            )
        if name.endswith(".sinks"):
            raise AdapterFormatError(f"trained sinks ({short(name)}) are not served; train the adapter without")
        if id(tensor) not in converted:
            converted[id(tensor)] = read_only(_finite(tensor, name))
        replaced[name] = converted[id(tensor)]
    return replaced


def _vocab_size(raw: RawAdapter, spec: ModelSpec) -> int:
    """The number of rows of the embedding and output matrices in training: the base's, unless they were resized.
    Raises AdapterMismatch for two numbers.
    """
    sizes = {}
    for module in raw.modules:
        if module.path == EMBEDDING_PATH and len(module.a.shape) == 2:
            sizes[module.path] = module.a.shape[1]
        elif module.path == "lm_head" and len(module.b.shape) == 2:
            sizes[module.path] = module.b.shape[0]
    for name, tensor in raw.parameters:
        if name in _OUTER_WEIGHTS and tensor.shape[1:] == (spec.hidden_size,):
            sizes[name] = tensor.shape[0]
    trained = {rows.path: max(rows.token_ids) + 1 for rows in raw.token_rows}
    size = next(iter(sizes.values()), max(spec.vocab_size, *trained.values(), 0))
    wrong = [name for name, found in sizes.items() if found != size]
    wrong += [path for path, least in trained.items() if least > size]
    if wrong:
        (first, *_), found = sizes or [spec.name], (sizes | trained)[wrong[0]]
        raise AdapterMismatch(
            f"{short(first)} has {size} rows, but {short(wrong[0])} {found}; resize both ends with "
            "resize_token_embeddings before training"
        )
    return size


def _check_appended_rows(
    raw: RawAdapter,
    replaced: Mapping[str, NDArray[np.float32]],
    token_rows: Mapping[str, TokenRows],
    vocab_size: int,
    spec: ModelSpec,
) -> None:
    """Raise AdapterMismatch for a token beyond the base's that has no row at one end."""
    for path, weight in zip(OUTER_MODULES, _OUTER_WEIGHTS, strict=True):
        if weight in replaced or (path == "lm_head" and any(map(is_head, replaced))):
            continue
        name, missing = path.rsplit(".", 1)[-1], spec.vocab_size
        for token_id in sorted(token_rows[name].token_ids if name in token_rows else ()):
            missing += token_id == missing
        if missing < vocab_size:
            added = AdapterTokenizer.from_json(raw.text).added_tokens
            text = next((f" ({short(text)})" for text, own in added.items() if own.token_id == missing), "")
            raise AdapterMismatch(
                f"the adapter was trained after {vocab_size - spec.vocab_size} tokens were added to the "
                f"{spec.vocab_size} of '{spec.name}', but it has no row of {name} for token {missing}{text}; save it "
                "again with save_embedding_layers=True"
            )


def _is_wrapped(raw: RawAdapter, name: str) -> bool:
    return any(f"{module.path}.weight" == name for module in raw.modules)


def _token_rows(raw: RawAdapter, spec: ModelSpec) -> dict[str, TokenRows]:
    """PEFT trains the rows of a tied matrix once, for input and output."""
    found = {}
    for rows in raw.token_rows:
        if rows.path not in OUTER_MODULES:
            raise AdapterMismatch(f"rows of {short(rows.path)}: only {' and '.join(OUTER_MODULES)} have rows per token")
        if rows.rows.shape != (len(rows.token_ids), spec.hidden_size):
            raise AdapterMismatch(
                f"{rows.path}: {list(rows.rows.shape)} trained rows, but {len(rows.token_ids)} are named and those of "
                f"'{spec.name}' have {spec.hidden_size} values"
            )
        name = rows.path.rsplit(".", 1)[-1]
        found[name] = TokenRows(rows.token_ids, read_only(_finite(rows.rows, rows.path)))
    if spec.tie_embeddings and "embed_tokens" in found:
        found.setdefault("lm_head", found["embed_tokens"])
    return found


def _check_shapes(module: RawModule, d_in: int, d_outs: tuple[int, ...], spec: ModelSpec, limits: ReadLimits) -> None:
    a, b = module.a.shape, module.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] < 1 or a[0] != b[1]:
        raise AdapterFormatError(f"{module.path}: lora_A {list(a)} and lora_B {list(b)} are not [r, in] and [out, r]")
    if a[0] > limits.max_rank:
        raise AdapterTooLarge(f"{module.path}: rank {a[0]} but at most {limits.max_rank}; train at a lower rank")
    if a[1] != d_in or b[0] != sum(d_outs):
        raise AdapterMismatch(
            f"{module.path}: the adapter maps {a[1]} to {b[0]} but the module of '{spec.name}' maps "
            f"{d_in} to {sum(d_outs)}; it was trained on another model"
        )


def _fold(module: RawModule, d_outs: tuple[int, ...], *, alternates: bool = False) -> list[LoraPair]:
    """One pair per slice of the output, with the scale folded into b. The slices of a fused module share one A.

    alternates: the slices' rows alternate (gate, up, gate, …) instead of following each other.
    """
    a = read_only(_finite_as_saved(module.a, module.path, "lora_A"))  # [r, d_in]
    saved = _finite_as_saved(module.b, module.path, "lora_B")  # [d_out, r]
    b = _times_power_of_two(saved, module.scale) if saved.dtype == BFLOAT16 else None
    if b is None:
        b = _times_scale(to_float32(saved), module.scale, f"{module.path}: lora_B")
    if alternates:
        b = np.concatenate([b[n :: len(d_outs)] for n in range(len(d_outs))])
    pairs = []
    start = 0
    for d_out in d_outs:
        pairs.append(LoraPair(a, read_only(np.array(b[start : start + d_out].T, order="C"))))  # [r, d_out], own memory
        start += d_out
    return pairs


def _slices(tensor: RawTensor | None, d_outs: tuple[int, ...], scale: float, what: str) -> list[NDArray[np.float32]]:
    """One `[d_out]` vector per slice of the output, times `scale`; [] if there is no tensor."""
    if tensor is None:
        return []
    if tensor.shape != (sum(d_outs),):
        raise AdapterMismatch(f"{what} is {list(tensor.shape)} but the module has {sum(d_outs)} outputs")
    values = _times_scale(_finite(tensor, what), scale, what)
    ends = np.cumsum(d_outs)
    return [read_only(part.copy()) for part in np.split(values, ends[:-1])]


def _times_scale(values: NDArray[np.float32], scale: float, what: str) -> NDArray[np.float32]:
    """`values` times `scale` in float32, in place."""
    with np.errstate(over="ignore", invalid="ignore"):  # checked below, with the module's name
        values *= np.float32(scale)
    if not np.isfinite(values).all():
        raise AdapterFormatError(f"{what} times its scale {scale} leaves float32; lower alpha")
    return values


def _times_power_of_two(values: Matrix, scale: float) -> Matrix | None:
    """Finite bfloat16 values times `scale`; None unless it is a power of two and every product a normal number."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        return None
    bits = values.view(np.uint16)
    magnitudes = bits & np.uint16(_MAGNITUDE)
    step = (exponent - 1) << _MANTISSA_BITS  # added to the exponent bits
    largest, smallest = int(magnitudes.max()), int((magnitudes - np.uint16(1)).min()) + 1  # zeros wrap around
    if step == 0 or largest == 0:
        return values
    if largest + step >= _INFINITE or smallest < _NORMAL or smallest + step < _NORMAL:
        return None
    products: Matrix = np.where(magnitudes == 0, bits, bits + np.uint16(step & 0xFFFF)).view(BFLOAT16)
    return products


def _finite_as_saved(tensor: RawTensor, path: str, half: str) -> Matrix:
    """Like `_finite`, but bfloat16 stays bfloat16."""
    values = tensor.as_saved()
    if values.dtype == BFLOAT16 and int((values.view(np.uint16) & np.uint16(_MAGNITUDE)).max()) < _INFINITE:
        return values
    return _finite(tensor, path, half)


def _finite(tensor: RawTensor, path: str, half: str = "") -> NDArray[np.float32]:
    values = tensor.to_float32()
    finite = np.isfinite(values)
    if not finite.all():
        place = tuple(int(index) for index in np.argwhere(~finite)[0])
        name = f"{path}: {half}" if half else path
        raise AdapterFormatError(f"{name}{list(place)} is {values[place]}; the adapter is broken, train it again")
    return values
