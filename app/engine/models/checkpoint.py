"""Opens a base model: a GGUF file, or a Hugging Face folder with config.json and safetensors.

A `Checkpoint` has the spec and streams its tensors under canonical names, one at a time, as NumPy arrays. It is
complete: every tensor that the spec implies is there, in its shape, and none is left over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.download.digest import base_digest, file_sha256
from app.engine.models.download.model_download import resolve_model
from app.engine.models.gguf.gguf_file import read_gguf
from app.engine.models.gguf.gguf_model import gguf_shapes, gguf_tensors, spec_from_gguf
from app.engine.models.hf import gemma, gpt_oss
from app.engine.models.hf.architectures import FAMILIES
from app.engine.models.hf.config import spec_from_config, unknown_family
from app.engine.models.hf.encoder_config import encoder_spec, folder_pooling, is_encoder
from app.engine.models.hf.encoder_weight_names import without_heads
from app.engine.models.hf.headers import spec_from_headers
from app.engine.models.hf.safetensors_folder import TensorPlace, read_json, read_tensors, stored_tensors
from app.engine.models.moe_weight_layouts import canonical_shapes, canonical_tensors
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import EMBEDDING, LM_HEAD, check_quantised, check_tensors

#: The key of `config.json` that says how weights are quantised.
QUANTIZATION = "quantization_config"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete base model. `tokenizer_source` is the argument of `load_tokenizer`.

    tensors(): (canonical name, values [d_out, d_in] or [d]) in the stored dtype; GGUF as float32. `needs_vllm`: why
    only vLLM can read the weights; then `tensors` raises it as a CheckpointError. `tensors_digest`: of the files that
    `tensors` reads; empty if it yields something else.
    """

    spec: ModelSpec
    tokenizer_source: Path
    tensors: Callable[[], Iterator[tuple[str, NDArray[Any]]]]
    needs_vllm: str = ""
    tensors_digest: str = ""

    def computed_in(self, arithmetic: str) -> Checkpoint:
        """This model, see `in_arithmetic`."""
        return replace(self, spec=in_arithmetic(self.spec, arithmetic))


def in_arithmetic(spec: ModelSpec, arithmetic: str) -> ModelSpec:
    """The spec with the arithmetic (`EngineConfig.arithmetic`) in its digest: nothing computed in one is used with
    another.

    KV blocks, adapters and everything registered for a base model belong to a digest; float32's is the files'.
    """
    if arithmetic == "float32":
        return spec
    parts = [("files", spec.digest), ("compute", hashlib.sha256(arithmetic.encode()).hexdigest())]
    return replace(spec, digest=base_digest(parts))


def open_model(uri: str, name: str, arithmetic: str = "float32") -> Checkpoint:
    """Open the base model at `uri` under this name, downloading it once per machine if necessary.

    Only `tensors` reads the weights. Raises SourceError, CheckpointError.
    """
    return load_checkpoint(resolve_model(uri), name).computed_in(arithmetic)


def load_checkpoint(path: Path | str, name: str | None = None) -> Checkpoint:
    """Open a base model; `name` is for people and defaults to the file's or folder's.

    CheckpointError names what is missing, unexpected, mis-shaped or unknown.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path, name or path.resolve().name)
    if path.is_file():
        return _load_gguf(path, name or path.stem)
    raise CheckpointError(f"no base model at {path}: neither a folder nor a GGUF file")


def _load_gguf(path: Path, name: str) -> Checkpoint:
    file = read_gguf(path)
    spec = spec_from_gguf(file, name, base_digest([("gguf", file_sha256(path))]))
    check_tensors(spec, gguf_shapes(file))
    return Checkpoint(spec, path, lambda: gguf_tensors(file, spec), tensors_digest=spec.digest)


def _load_folder(folder: Path, name: str) -> Checkpoint:
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    quantization = config.get(QUANTIZATION)
    if isinstance(quantization, dict) and config.get("model_type") != gpt_oss.FAMILY:
        method = quantization.get("quant_method")
        return _describe(folder, name, config, f"the weights of {name!r} are quantised ({method})")
    if not is_encoder(config) and str(config.get("model_type")) not in FAMILIES:
        return _describe(folder, name, config, unknown_family(config))
    stored = {key: value for key, value in stored_tensors(folder).items() if not _is_rotary_buffer(key)}
    if is_encoder(config):
        return _load_encoder(folder, name, config, stored)
    digest = _folder_digest(folder, stored)
    spec = spec_from_config(config, name, digest, read_json(generation) if generation.is_file() else None)
    spec = replace(spec, pooling=folder_pooling(folder) or spec.pooling)
    if spec.tie_embeddings and LM_HEAD in stored:
        _check_tied_values(stored)
        del stored[LM_HEAD]
    shapes = {key: value.shape for key, value in stored.items()}
    shapes_of: Callable[[dict[str, tuple[int, ...]]], dict[str, tuple[int, ...]]] = canonical_shapes
    tensors_of: Callable[[Iterator[tuple[str, NDArray[Any]]]], Iterator[tuple[str, NDArray[Any]]]] = canonical_tensors
    if spec.family in gemma.FAMILIES:
        shapes_of, tensors_of = gemma.canonical_names, gemma.canonical_tensors
    elif spec.family == gpt_oss.FAMILY:
        shapes_of, tensors_of = gpt_oss.canonical_shapes, gpt_oss.canonical_tensors
    check_tensors(spec, shapes_of(shapes))
    return Checkpoint(spec, folder, lambda: tensors_of(read_tensors(stored)), tensors_digest=digest)


def _describe(folder: Path, name: str, config: dict[str, Any], reason: str) -> Checkpoint:
    """A checkpoint whose weights vLLM reads by itself, for a `reason`: adapters need only the shapes of its modules."""
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else None
    stored = stored_tensors(folder, is_quantised=True)
    digest = _folder_digest(folder, stored)
    if str(config.get("model_type")) in FAMILIES:
        plain = {key: value for key, value in config.items() if key != QUANTIZATION}
        spec = spec_from_config(plain, name, digest, generation_config)
        check_quantised(spec, {key: (place.shape, place.dtype) for key, place in stored.items()})
    else:
        spec = spec_from_headers(config, name, digest, stored, generation_config)
    spec = replace(spec, pooling=folder_pooling(folder) or spec.pooling)
    reason = f"{reason}, which only engine.vllm may read"

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        raise CheckpointError(reason)

    return Checkpoint(spec, folder, tensors, reason)


def _load_encoder(folder: Path, name: str, config: Mapping[str, Any], stored: dict[str, TensorPlace]) -> Checkpoint:
    spec = encoder_spec(config, name, _folder_digest(folder, stored), folder_pooling(folder) or "mean")
    names = without_heads(stored)
    check_tensors(spec, {plain: stored[key].shape for key, plain in names.items()})
    own = {key: stored[key] for key in names}

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        return ((names[key], tensor) for key, tensor in read_tensors(own))

    return Checkpoint(spec, folder, tensors, tensors_digest=spec.digest)


def _folder_digest(folder: Path, stored: dict[str, TensorPlace]) -> str:
    parts = [("config.json", hashlib.sha256((folder / "config.json").read_bytes()).hexdigest())]
    parts += [(file.name, file_sha256(file)) for file in sorted({tensor.file for tensor in stored.values()})]
    return base_digest(parts)


def _is_rotary_buffer(name: str) -> bool:
    """Old checkpoints store the rotary frequencies, which follow from the config."""
    return name.endswith(".rotary_emb.inv_freq")


def _check_tied_values(stored: dict[str, TensorPlace]) -> None:
    if EMBEDDING not in stored:
        return  # reported as missing, with its name
    pair = dict(read_tensors({name: stored[name] for name in (EMBEDDING, LM_HEAD)}))
    if not np.array_equal(pair[EMBEDDING], pair[LM_HEAD]):
        raise CheckpointError(
            f"the config ties {LM_HEAD!r} to {EMBEDDING!r} but the file holds different values; "
            "set tie_word_embeddings to false if the stored lm_head is meant"
        )
