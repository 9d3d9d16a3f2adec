"""An adapter as it was saved: raw tensors and numbers, before it is checked against a base model.

Every reader (PEFT folder, Arrow card) produces a `RawAdapter`, and `build_adapter` turns it into what is served.
Tensors keep the bytes and the dtype they were saved in, so converting to another format and back changes no bit. The
digest is computed here, because it must not depend on the format, on the order of tensors or on descriptions.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import BFLOAT16, Matrix
from app.engine.adapters.quantize import dequantize
from app.engine.errors import AdapterFormatError

#: Bytes per element of the dtypes that a trained tensor may have, by safetensors name.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

#: Bits per element of quantised storage (Arrow cards only); see `app.engine.adapters.quantize`.
QUANTIZED_BITS = {"I8": 8, "I4": 4}

#: The module whose LoRA is looked up instead of multiplied.
EMBEDDING_PATH = "model.embed_tokens"

_DIGEST_DOMAIN = b"polylora/adapter/v1"


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's raw little-endian bytes. `data` is C-contiguous, `raw_size_bytes(dtype, shape)` long.

    `scales` has one float32 per group of a quantised tensor and is empty for others.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    scales: memoryview | bytes = b""

    def to_float32(self) -> NDArray[np.float32]:
        """The values as a new, aligned float32 array of `shape`: exact for F32, F16 and BF16, rounded from F64.

        Values beyond float32's range become infinite.
        """
        if self.dtype in QUANTIZED_BITS:
            return dequantize(self.data, self.scales, self.dtype, math.prod(self.shape)).reshape(self.shape)
        if self.dtype == "BF16":
            bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32)
            bits <<= np.uint32(16)
            return bits.view(np.float32).reshape(self.shape)
        kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[self.dtype]
        with np.errstate(over="ignore"):  # the caller refuses values that are not finite
            return np.frombuffer(self.data, dtype=kind).astype(np.float32).reshape(self.shape)

    def as_saved(self) -> Matrix:
        """BF16 as an aligned array, a view if possible; `to_float32` for other dtypes."""
        if self.dtype != "BF16":
            return self.to_float32()
        values: Matrix = np.frombuffer(self.data, dtype="<u2").view(BFLOAT16)
        return (values if values.flags.aligned else values.copy()).reshape(self.shape)


def bits_of(tensor: RawTensor) -> NDArray[Any]:
    """The values as unsigned integers of their size, for moving without arithmetic. Not for quantised tensors."""
    return np.frombuffer(tensor.data, f"<u{DTYPE_BYTES[tensor.dtype]}").reshape(tensor.shape)


def tensor_of(dtype: str, bits: NDArray[Any]) -> RawTensor:
    """The opposite of `bits_of`."""
    whole = np.ascontiguousarray(bits)
    return RawTensor(dtype, tuple(whole.shape), whole.view(np.uint8).reshape(-1).data)


def transpose(tensor: RawTensor) -> RawTensor:
    """[m, n] as [n, m], bit by bit; a tensor of another shape, which readers refuse, as it is. Not for quantised
    tensors."""
    return tensor_of(tensor.dtype, bits_of(tensor).T) if len(tensor.shape) == 2 else tensor


def raw_size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape`, without its scales."""
    bits = QUANTIZED_BITS.get(dtype) or 8 * DTYPE_BYTES[dtype]
    return -(-math.prod(shape) * bits // 8)


@dataclass(frozen=True, slots=True)
class RawModule:
    """One module's pair as saved: a `[r, d_in]`, b `[d_out, r]` (PEFT's orientation).

    `path` is the module's name in the base model ("model.layers.0.self_attn.q_proj"). An embedding maps V tokens to H.
    `magnitude` is DoRA's m and `bias` lora_B's, both `[d_out]`.
    """

    path: str
    a: RawTensor
    b: RawTensor
    alpha: float
    use_rslora: bool
    magnitude: RawTensor | None = None
    bias: RawTensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """alpha/r (Hu et al. 2021), or alpha/sqrt(r) for rsLoRA (Kalajdzievski 2023), as PEFT computes it."""
        return self.alpha / math.sqrt(self.rank) if self.use_rslora else self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class RawTokenRows:
    """Rows of the matrix at `path` ("model.embed_tokens", "lm_head") that the adapter replaces: `[n, H]`."""

    path: str
    token_ids: tuple[int, ...]
    rows: RawTensor


@dataclass(frozen=True, slots=True)
class RawAdapter:
    """Modules sorted by path, each path once. `parameters` are base tensors that are replaced, sorted by name.

    A weight of the embedding or lm_head that also has a LoRA is the base's matrix saved along with it; where a base
    ties the two, it stands for both. One without a LoRA replaces its own end only. `invocation_tokens` and `metadata`:
    see `AdapterCard`.
    """

    modules: tuple[RawModule, ...]
    description: str = ""
    parameters: tuple[tuple[str, RawTensor], ...] = ()
    token_rows: tuple[RawTokenRows, ...] = ()
    text: str = ""
    invocation_tokens: tuple[int, ...] = ()
    metadata: str = ""

    def __post_init__(self) -> None:
        paths = [module.path for module in self.modules]
        if paths != sorted(set(paths)):
            raise AdapterFormatError("modules are repeated or out of order; each module path appears once")
        for names in ([name for name, _ in self.parameters], [rows.path for rows in self.token_rows]):
            if names != sorted(set(names)):
                raise AdapterFormatError("parameters or token rows are repeated or out of order")


def content_digest(adapter: RawAdapter, base_digest: str) -> str:
    """Hex SHA-256 of everything that changes the output: base, scales, tensors.

    Each field is preceded by its length, so different adapters never hash the same bytes; the domain tag separates
    these hashes from the project's other uses of SHA-256.
    """
    digest = hashlib.sha256()

    def add(field: bytes | memoryview) -> None:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)

    def add_tensor(tensor: RawTensor) -> None:
        add(tensor.dtype.encode())
        add(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        add(tensor.data)
        add(tensor.scales)

    add(_DIGEST_DOMAIN)
    add(base_digest.encode())
    add(struct.pack("<Q", len(adapter.modules)))
    for module in adapter.modules:
        add(module.path.encode())
        add(struct.pack("<d", module.scale + 0.0))  # + 0.0: alpha 0 and -0 are one scale
        add_tensor(module.a)
        add_tensor(module.b)
        for role, tensor in (("magnitude", module.magnitude), ("bias", module.bias)):
            if tensor is not None:
                add(role.encode())
                add_tensor(tensor)
    for name, tensor in adapter.parameters:
        add(b"parameter " + name.encode())
        add_tensor(tensor)
    for token_rows in adapter.token_rows:
        add(b"token rows " + token_rows.path.encode())
        add(struct.pack(f"<{len(token_rows.token_ids)}Q", *token_rows.token_ids))
        add_tensor(token_rows.rows)
    if adapter.invocation_tokens:
        add(b"invocation tokens")
        add(struct.pack(f"<{len(adapter.invocation_tokens)}Q", *adapter.invocation_tokens))
    return digest.hexdigest()
