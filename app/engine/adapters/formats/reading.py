"""Reads an adapter in any format: a folder is PEFT's, a `.lora.arrow` file is an Arrow card."""

from __future__ import annotations

from pathlib import Path

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.bounded_files import DEFAULT_LIMITS, ReadLimits
from app.engine.adapters.formats.arrow import CARD_SUFFIX, read_card
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.raw_adapter import RawAdapter
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError
from app.engine.models.spec import ModelSpec


def read_adapter(
    path: Path, spec: ModelSpec, limits: ReadLimits = DEFAULT_LIMITS, supported_features: frozenset[str] = frozenset()
) -> LoraAdapter:
    """The adapter at `path`, ready to serve on `spec`. Raises an AdapterError; supported_features: see
    `build_adapter`.
    """
    return build_adapter(read_raw_adapter(path, spec, limits), spec, limits, supported_features)


def read_raw_adapter(path: Path, spec: ModelSpec | None, limits: ReadLimits = DEFAULT_LIMITS) -> RawAdapter:
    """The adapter at `path` as saved; checked against the base's modules if given. Raises an AdapterError."""
    if path.is_dir():
        return read_raw_peft(path, spec, limits)
    if path.name.endswith(CARD_SUFFIX):
        return read_card(path, limits).raw
    if not path.exists():
        raise AdapterFormatError(f"there is no file or folder {short(path.name)}")
    hint = "; name the folder that it lies in" if path.name in (CONFIG_NAME, WEIGHTS_NAME) else ""
    raise AdapterFormatError(f"{short(path.name)} is neither a PEFT folder nor a {CARD_SUFFIX} file{hint}")
