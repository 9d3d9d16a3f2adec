"""An adapter as the rows of a card, and back, bit for bit: one row per tensor or pair, each with a role.

    role         path             a                        b
    lora         module           lora_A [r, d_in]         lora_B [d_out, r]
    magnitude    module           DoRA's m [d_out]
    bias         module           lora_B's bias [d_out]
    parameter    base tensor      the whole tensor
    token_rows   embedding        rows [n, H]              token ids [n], int64

A magnitude or bias without its module, an unknown role or a repeated name is an error. `arrow` lays rows out in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.engine.adapters.raw_adapter import DTYPE_BYTES, QUANTIZED_BITS, RawAdapter, RawModule, RawTensor, RawTokenRows
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

LORA = "lora"
TOKEN_IDS = "I64"

#: Role -> (numbers of dimensions of a, those of b). None: there is no b.
ROLES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    LORA: ((2,), (2,)),
    "magnitude": ((1,), None),
    "bias": ((1,), None),
    "parameter": ((1, 2), None),
    "token_rows": ((2,), (1,)),
}
NO_TENSOR = RawTensor("", (), memoryview(b""))


@dataclass(frozen=True, slots=True)
class CardRow:
    """`alpha` and `use_rslora` are for LoRA rows; others have 0 and False. `b` may be `NO_TENSOR`."""

    path: str
    role: str
    a: RawTensor
    b: RawTensor = NO_TENSOR
    alpha: float = 0.0
    use_rslora: bool = False


def card_rows(raw: RawAdapter) -> list[CardRow]:
    """Modules first, then magnitudes and biases, then parameters and token rows; by path within a role."""
    rows = [CardRow(module.path, LORA, module.a, module.b, module.alpha, module.use_rslora) for module in raw.modules]
    rows += [CardRow(module.path, "magnitude", module.magnitude) for module in raw.modules if module.magnitude]
    rows += [CardRow(module.path, "bias", module.bias) for module in raw.modules if module.bias]
    rows += [CardRow(name, "parameter", tensor) for name, tensor in raw.parameters]
    for item in raw.token_rows:
        ids = np.array(item.token_ids, "<i8")
        rows.append(
            CardRow(item.path, "token_rows", item.rows, RawTensor(TOKEN_IDS, ids.shape, memoryview(ids.tobytes())))
        )
    return rows


def raw_adapter_from_rows(rows: Sequence[CardRow], description: str) -> RawAdapter:
    """The adapter in these rows. Raises AdapterFormatError."""
    by_role: dict[str, dict[str, CardRow]] = {role: {} for role in ROLES}
    for row in rows:
        _check(row)
        if row.path in by_role[row.role]:
            raise AdapterFormatError(f"{row.role} of {short(row.path)} is stored twice")
        by_role[row.role][row.path] = row
    modules = {path: RawModule(path, row.a, row.b, row.alpha, row.use_rslora) for path, row in by_role[LORA].items()}
    for path, row in [*by_role["magnitude"].items(), *by_role["bias"].items()]:
        if path not in modules:
            raise AdapterFormatError(f"{row.role} of {short(path)}, which has no lora row")
        is_bias = row.role == "bias"
        modules[path] = replace(modules[path], bias=row.a) if is_bias else replace(modules[path], magnitude=row.a)
    parameters = tuple((path, row.a) for path, row in _by_path(by_role["parameter"].values()))
    token_rows = [RawTokenRows(path, _token_ids(row), row.a) for path, row in _by_path(by_role["token_rows"].values())]
    return RawAdapter(tuple(modules.values()), description, parameters, tuple(token_rows))


def _by_path(rows: Iterable[CardRow]) -> list[tuple[str, CardRow]]:
    return sorted(((row.path, row) for row in rows), key=lambda item: item[0])


def _check(row: CardRow) -> None:
    where = f"module {short(row.path)}"
    if row.role not in ROLES:
        raise AdapterFormatError(f"{where}: role {short(row.role)} is not known")
    if row.role != LORA and (row.alpha != 0 or row.use_rslora):
        raise AdapterFormatError(f"{where}: role {row.role} has no alpha")
    of_a, of_b = ROLES[row.role]
    for half, tensor, dimensions in (("a", row.a, of_a), ("b", row.b, of_b)):
        if (tensor.dtype == "") != (dimensions is None) or (dimensions and len(tensor.shape) not in dimensions):
            raise AdapterFormatError(f"{where}: shape_{half} {list(tensor.shape)} does not suit role {row.role}")
        is_ids = half == "b" and row.role == "token_rows"
        dtypes = (TOKEN_IDS,) if is_ids else ("", *DTYPE_BYTES, *(QUANTIZED_BITS if row.role == LORA else ()))
        if tensor.dtype not in dtypes:
            raise AdapterFormatError(f"{where}: dtype_{half} {tensor.dtype} does not suit role {row.role}")


def _token_ids(row: CardRow) -> tuple[int, ...]:
    ids = tuple(np.frombuffer(row.b.data, "<i8").tolist())
    if len(ids) != row.a.shape[0] or len(set(ids)) != len(ids) or min(ids) < 0:
        raise AdapterFormatError(f"module {short(row.path)}: {len(ids)} token ids do not name {row.a.shape[0]} rows")
    return ids
