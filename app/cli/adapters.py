"""`polylora convert`, `inspect`, `check`, `merge`, `keygen` and `sign`: commands on adapters that need no server."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.bounded_files import link_error
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, read_card, write_arrowengine_card, write_card
from app.engine.adapters.formats.arrow_rows import LORA, card_rows
from app.engine.adapters.formats.convert import quantize_adapter, write_peft_folder
from app.engine.adapters.formats.other_layouts import read_other_layout, weights_of
from app.engine.adapters.formats.peft_experts import fuse_gate_up
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.paths import named_path
from app.engine.adapters.quantize import Quantization
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, content_digest
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterError, AdapterFormatError
from app.engine.models.spec import ModelSpec
from app.redaction import escape_control_chars

if TYPE_CHECKING:  # with the registry's tables, for `check` alone
    from app.deployments.registry.pins import EngineCapacity

#: Settings file of commands that are given none.
DEFAULT_CONFIG = "configs/serve.yaml"

_QUANTIZE = {"int8": "I8", "int4": "I4"}


def add_config_option(parser: argparse._ActionsContainer, what: str) -> None:
    """Add `--config`; what: what the file is for this command."""
    parser.add_argument("--config", type=Path, default=Path(DEFAULT_CONFIG), help=f"{what}; default: {DEFAULT_CONFIG}")


def add_base_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a base model."""
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", help="path or source URI of the base model")
    add_config_option(base, "a settings file: its base")


def base_spec_of(arguments: argparse.Namespace) -> ModelSpec:
    """The base model that the options name, in the settings' arithmetic. Its `name` is the one in the settings,
    followed by the file's if that differs.
    """
    from app.cli.config_file import read_settings
    from app.engine.models.checkpoint import in_arithmetic

    if arguments.base:
        spec = _base_spec(arguments.base)
        is_fetched = "://" in arguments.base  # its folder's name says little
        return replace(spec, name=arguments.base) if is_fetched else spec
    settings = read_settings(arguments.config)
    model, spec = settings.model, in_arithmetic(_base_spec(settings.model.uri), settings.engine.arithmetic)
    return spec if model.name == spec.name else replace(spec, name=f"{model.name} ({spec.name})")


def add_commands(commands: Any) -> None:
    """Add the commands to `argparse.ArgumentParser.add_subparsers()`."""
    convert = commands.add_parser("convert", help="convert a PEFT folder to an Arrow card, or a card to a folder")
    convert.add_argument(
        "source",
        type=named_path,
        help=f"PEFT folder, {CARD_SUFFIX} file, or an adapter of MLX, torchtune, kohya or diffusers as safetensors",
    )
    convert.add_argument("target", type=Path, help=f"{CARD_SUFFIX} file, or a folder for PEFT")
    convert.add_argument("--name", help="name in the card; default: the file's name")
    convert.add_argument(
        "--quantize", choices=sorted(_QUANTIZE), help="quantize the weights; the error is stored in the card"
    )
    convert.add_argument(
        "--base",
        help="path or source URI of the base model, which old layouts of experts and torchtune's adapters need",
    )
    convert.add_argument(
        "--plain",
        action="store_true",
        help="write ArrowEngine's columns (module, weight_a, weight_b, shape_a, shape_b, dtype): LoRA of one rank only",
    )
    convert.add_argument("--set", action="append", default=[], metavar="KEY=TEXT", help="free metadata of the card")
    convert.set_defaults(run=_convert)

    inspect = commands.add_parser("inspect", help="show an adapter's ranks, targets, norms, size and metadata")
    inspect.add_argument("source", type=named_path, help=f"PEFT folder or {CARD_SUFFIX} file")
    inspect.set_defaults(run=_inspect)

    check = commands.add_parser("check", help="check whether an adapter loads on a base model, and if not, why")
    check.add_argument("source", type=named_path, help=f"PEFT folder or {CARD_SUFFIX} file")
    add_base_options(check)
    check.set_defaults(run=_check)

    merge = commands.add_parser("merge", help="write the base model with an adapter merged into it")
    merge.add_argument("adapter", type=named_path, help="PEFT folder or card")
    merge.add_argument("target", type=Path, help="a new folder")
    add_base_options(merge)
    merge.set_defaults(run=_merge)

    keygen = commands.add_parser("keygen", help="make a key for signing adapters")
    keygen.add_argument("key", type=Path, help="file to write the private key to; prints the public key")
    keygen.set_defaults(run=_keygen)

    sign = commands.add_parser("sign", help="sign an adapter for a base model")
    sign.add_argument("source", type=named_path, help="PEFT folder or card")
    sign.add_argument("--key", type=Path, required=True, help="a file made by keygen")
    add_base_options(sign)
    sign.set_defaults(run=_sign)


def report(raw: RawAdapter) -> list[str]:
    """Lines that describe an adapter: what it changes and how strongly."""
    rows = card_rows(raw)
    tensors = [tensor for row in rows if row.role == LORA for tensor in (row.a, row.b)]
    size = sum(len(tensor.data) + len(tensor.scales) for tensor in tensors)
    extra_counts = Counter(row.role for row in rows if row.role != LORA)
    extra_bytes = sum(len(row.a.data) for row in rows if row.role != LORA)
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    layers = sorted({module.path.split(".")[2] for module in raw.modules if module.path.count(".") > 2}, key=int)
    span = f" ({layers[0]} to {layers[-1]})" if layers else ""
    scales = sorted({module.scale for module in raw.modules})
    lines = [
        f"modules      {len(raw.modules)} in {len(layers)} layers{span}",
        *experts_line(raw),
        *_activation_line(raw),
        f"ranks        {', '.join(map(str, sorted({module.rank for module in raw.modules})))}",
        f"scales       {', '.join(f'{scale:g}' for scale in scales[:8])}{' …' if len(scales) > 8 else ''}",
        f"dtypes       {', '.join(sorted({tensor.dtype for tensor in tensors}))}",
        f"size         {size} bytes, {values} values",
        *(f"extra        {count} {role} ({extra_bytes} bytes in all)" for role, count in extra_counts.items()),
        f"contents     {content_digest(raw, base_digest='')} (without a base model)",
        "target           modules  mean norm of scale * B A",
    ]
    by_target: dict[str, list[RawModule]] = {}
    for module in raw.modules:
        by_target.setdefault(_target(module.path), []).append(module)
    for target, modules in sorted(by_target.items()):
        norms = [delta_norm(module) for module in modules]
        lines.append(f"  {target:<14} {len(modules):>7}  {sum(norms) / len(norms):.4g}")
    return lines


def _target(path: str) -> str:
    """A module's name; "experts.down_proj" for an expert's."""
    name = path.rsplit(".", 1)[-1]
    return f"experts.{name}" if ".experts." in path else name


def _activation_line(raw: RawAdapter) -> list[str]:
    """The invocation tokens of an activated LoRA; nothing for other adapters."""
    tokens = ", ".join(map(str, raw.invocation_tokens))
    return [f"activated    from the last {tokens} of a prompt on (alora_invocation_tokens)"] if tokens else []


def experts_line(raw: RawAdapter) -> list[str]:
    """How many experts an adapter changes, in how many layers; nothing if none."""
    found = {tuple(path.split(".")[2:6:3]) for path in (m.path for m in raw.modules) if ".experts." in path}
    if not found:
        return []
    layers = {layer for layer, _ in found}
    experts = {expert for _, expert in found}
    return [f"experts      {len(experts)} different in {len(layers)} layers, {len(found)} in all"]


def delta_norm(module: RawModule) -> float:
    """Frobenius norm of scale * B A, from r × r products in float64."""
    a, b = module.a.to_float32().astype(np.float64), module.b.to_float32().astype(np.float64)
    return abs(module.scale) * math.sqrt(max(0.0, float(np.sum((b.T @ b) * (a @ a.T)))))


def parse_metadata(pairs: list[str]) -> Mapping[str, str]:
    """KEY=TEXT arguments as a table. `AdapterFormatError` for one without a key, or a key given twice."""
    metadata: dict[str, str] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not key or not separator or key in metadata:
            raise AdapterFormatError(f"--set {short(pair)}: expected KEY=TEXT, each key once")
        metadata[key] = text
    return metadata


def _convert(arguments: argparse.Namespace) -> int:
    source, target = arguments.source, arguments.target
    spec = None if arguments.base is None else _base_spec(arguments.base)
    raw, name, metadata, quantization = _load(source, spec)
    if arguments.quantize:
        raw, quantization = quantize_adapter(raw, _QUANTIZE[arguments.quantize])
    metadata = {**metadata, **parse_metadata(arguments.set)}
    if arguments.plain or target.name.endswith(CARD_SUFFIX):
        write = write_arrowengine_card if arguments.plain else write_card
        write(target, ArrowCard(arguments.name or name, raw, metadata, quantization))
    elif target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise AdapterFormatError(f"'{target}' exists and is not an empty folder; name a new one")
    else:
        write_peft_folder(target, raw if spec is None else fuse_gate_up(raw, spec))
    print(f"wrote {target}")
    if quantization is not None:
        print(f"{quantization.dtype}: {_rounding(quantization)}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    raw, name, metadata, quantization = _load(arguments.source)
    print(f"name         {name}")
    for key, text in sorted(metadata.items()):
        print(f"{escape_control_chars(key):<12} {escape_control_chars(text)}")  # a line each, whatever a stranger wrote
    if quantization is not None:
        print(f"rounding     {quantization.dtype}, {_rounding(quantization)}")
    print("\n".join(report(raw)))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.deployments.registry.pins import EngineCapacity

    _check_there(arguments.source)
    spec = base_spec_of(arguments)
    capacity = EngineCapacity() if arguments.base else EngineCapacity.of(read_settings(arguments.config))
    try:
        lines = fits(arguments.source, spec, capacity)
    except AdapterError as error:
        print(f"no: {error}")
        return 1
    print("\n".join(lines))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.engine.adapters.merge import merge
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    checkpoint = load_checkpoint(resolve_model(arguments.base or read_settings(arguments.config).model.uri))
    adapter = read_adapter(arguments.adapter, checkpoint.spec, supported_features=FEATURES)
    num_modules = merge(checkpoint, adapter, arguments.target)
    print(f"wrote {arguments.target}: {num_modules} modules merged")
    return 0


def _keygen(arguments: argparse.Namespace) -> int:
    from app.engine.adapters.signing.signing import new_private_key, public_key

    print(public_key(new_private_key(arguments.key)))
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    from app.engine.adapters.signing.signing import public_key, read_private_key, sign, signature_path

    # read on its base model, as a server would: what cannot be served is not signed
    key = read_private_key(arguments.key)
    spec = base_spec_of(arguments)
    digest = read_adapter(arguments.source, spec, supported_features=FEATURES).card.digest
    path = signature_path(arguments.source)
    if path.is_symlink():
        raise link_error(path.name)
    path.write_text(sign(digest, key))
    print(f"wrote {path}: {digest[:12]} on '{spec.name}', signed by {public_key(key)}")
    return 0


def fits(source: Path, spec: ModelSpec, capacity: EngineCapacity) -> list[str]:
    """Lines about an adapter that loads on this base model. Raises an `AdapterError` that says why it does not.

    `capacity`: what an engine can hold.
    """
    adapter = build_adapter(read_raw_adapter(source, spec), spec, supported_features=FEATURES)
    card = adapter.card
    capacity.check(source.name, card.max_rank, card.extra_bytes)
    lines = [
        f"yes: {len(adapter.weights)} modules of '{spec.name}', rank {card.max_rank}, {card.size_bytes} bytes in memory"
    ]
    num_experts = sum(key.expert is not None for key in adapter.weights)
    if num_experts:
        lines.append(f"{num_experts} of them are experts'; besides rank rows it holds {card.extra_bytes} bytes")
    if adapter.features:
        needs = " and ".join(sorted(adapter.features))
        lines.append(f"needs an engine that applies {needs}: {card.extra_bytes} bytes there")
    return [*lines, f"digest {card.digest}"]


def _load(
    source: Path, spec: ModelSpec | None = None
) -> tuple[RawAdapter, str, Mapping[str, str], Quantization | None]:
    """(raw adapter, name, free metadata, quantization error or None)"""
    _check_there(source)
    if source.name.endswith(CARD_SUFFIX):
        card = read_card(source)
        return card.raw, card.name, card.metadata, card.quantization
    other = None if (source / WEIGHTS_NAME).exists() else weights_of(source)
    raw = read_raw_adapter(source, spec) if other is None else read_other_layout(other, spec)
    return raw, source.resolve().name, json.loads(raw.metadata or "{}"), None


def _check_there(source: Path) -> None:
    """Raise AdapterFormatError with the whole path, of which readers name only the last part."""
    if not source.exists():
        raise AdapterFormatError(f"there is no file or folder '{source}'")


def _rounding(quantization: Quantization) -> str:
    return f"output error {quantization.mean_error:.2%} mean, {quantization.max_error:.2%} at most"


def _base_spec(uri: str) -> ModelSpec:
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    return load_checkpoint(resolve_model(uri)).spec
