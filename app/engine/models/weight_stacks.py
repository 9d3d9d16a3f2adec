"""Base weights as the CPU kernels read them: stacks over layers, in the type that `weight_dtype` and `compute` say.

With "auto" a stack is in 8 bits exactly if the products equal those of float32 weights bit for bit, in all its layers;
a stack that turns out not to be exact is converted back to float32. Products in bfloat16 have weights in bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.config import Compute, WeightDtype
from app.engine.errors import ConfigError
from app.kernels.bf16_matmul import cpu as bf16
from app.kernels.bf16_matmul import self_test as bf16_self_test
from app.kernels.int8_matmul import self_test as int8_self_test
from app.kernels.int8_matmul.pack_dot import pack_dot
from app.kernels.int8_matmul.quantise import new_rows
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels, Stack
from app.kernels.matmul.pack_weights import FilledStack, dequantise_stack, empty_stack, store

_LOGGER = logging.getLogger(__name__)


class StackWriter:
    """One stack while it is filled."""

    def __init__(self, shape: tuple[int, int, int], dtype: WeightDtype | Literal["bfloat16"], team: ThreadTeam) -> None:
        """shape: layers, columns, depth."""
        self._team = team
        self._only_exact = dtype == "auto"
        self._stored: list[tuple[int, int, int]] = []
        self.stack: FilledStack | bf16.Bf16Panels = (
            bf16.empty_panels(*shape) if dtype == "bfloat16" else empty_stack(*shape, quantised=dtype != "float32")
        )

    def store(self, layer: int, first_column: int, w: NDArray[np.float32]) -> None:
        """Write w [N, K] to one layer's columns from first_column (a multiple of 16) on."""
        if isinstance(self.stack, bf16.Bf16Panels):
            bf16.pack(self._team, w, self.stack, layer, first_column)
            return
        exact = store(self._team, self.stack, layer, first_column, w, only_exact=self._only_exact)
        if self._only_exact and not exact:
            assert isinstance(self.stack, Int8Panels)  # float32 is exact
            self.stack = dequantise_stack(self._team, self.stack, self._stored)
            store(self._team, self.stack, layer, first_column, w)
        self._stored.append((layer, first_column, first_column + len(w)))


def product_form(compute: Compute) -> str | None:
    """The form of rounded products that this machine computes, None for float32.

    Raises ConfigError if it computes none exactly.
    """
    if compute == "float32":
        return None
    form: str | None = (int8_self_test if compute == "int8" else bf16_self_test).active_form()
    if form is None:
        raise ConfigError(
            f"engine.cpu.compute is {compute}, but no form of its products gives the reference's bits on this "
            "processor; set it to float32"
        )
    return form


class Products(NamedTuple):
    """The arithmetic of base products.

    max_rows: the most rows of each product that `compute` covers, by the name of its stack. Others are in float32.
    """

    compute: Compute
    max_rows: Mapping[str, int]

    def writer(
        self, name: str, shape: tuple[int, int, int], weight_dtype: WeightDtype, team: ThreadTeam
    ) -> StackWriter:
        """For the stack of this name."""
        is_bf16 = self.compute == "bfloat16" and name in self.max_rows
        return StackWriter(shape, "bfloat16" if is_bf16 else weight_dtype, team)

    def stacks(self, model: str, writers: dict[str, StackWriter]) -> dict[str, Stack]:
        """The filled stacks, laid out for their products; `writers` is emptied on the way.

        Raises ConfigError if there is nothing to compute in integers, or no form of the products works.
        """
        form = product_form(self.compute)
        filled = {name: writers.pop(name).stack for name in list(writers)}
        if form is None:
            return dict(filled)
        groups = {name: _num_groups(stack) for name, stack in filled.items() if name in self.max_rows}
        sizes = {name: self.max_rows[name] * count * GROUP for name, count in groups.items() if count}
        if not sizes:
            raise ConfigError(
                f"engine.cpu.compute is {self.compute}, but none of the projections of {model!r} can be stored in 8 "
                "bits without loss; set engine.cpu.weight_dtype to int8 to round them, or compute to float32"
            )
        bf16_rows = bf16.rows_for(form, max(sizes.values()) if self.compute == "bfloat16" else 0)
        int8_rows = new_rows(max(sizes.values()) if self.compute == "int8" else 0)
        stacks: dict[str, Stack] = {}
        for name in list(filled):
            stack = filled.pop(name)
            if isinstance(stack, bf16.Bf16Panels):
                stacks[name] = bf16.for_form(stack, form, bf16_rows)
            else:
                is_dot = self.compute == "int8" and name in sizes
                stacks[name] = pack_dot(stack, form, int8_rows) if is_dot and isinstance(stack, Int8Panels) else stack
        _LOGGER.info("%s: products in %s (%s): %s", model, self.compute, form, ", ".join(sorted(sizes)))
        return stacks


def _num_groups(stack: FilledStack | bf16.Bf16Panels) -> int:
    """Groups of a column of weights that can be multiplied by rounded rows; 0 for float32."""
    if isinstance(stack, bf16.Bf16Panels):
        num_groups: int = stack.pairs.shape[2]
        return num_groups
    return stack.scales.shape[2] if isinstance(stack, Int8Panels) else 0
