"""Base weights as the CPU kernels read them: stacks over layers, in float32 or in 8 bits as `weight_dtype` says.

With "auto" a stack is in 8 bits exactly if the products equal those of float32 weights bit for bit, in all its layers;
a stack that turns out not to be exact is converted back to float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.engine.config import WeightDtype
from app.engine.errors import ConfigError
from app.kernels.int8_matmul.pack_dot import pack_dot
from app.kernels.int8_matmul.quantise import new_rows
from app.kernels.int8_matmul.self_test import active_form
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels, Stack
from app.kernels.matmul.pack_weights import FilledStack, dequantise_stack, empty_stack, store

_LOGGER = logging.getLogger(__name__)


class StackWriter:
    """One stack while it is filled."""

    def __init__(self, shape: tuple[int, int, int], weight_dtype: WeightDtype, team: ThreadTeam) -> None:
        """shape: layers, columns, depth."""
        self._team = team
        self._only_exact = weight_dtype == "auto"
        self._stored: list[tuple[int, int, int]] = []
        self.stack: FilledStack = empty_stack(*shape, quantised=weight_dtype != "float32")

    def store(self, layer: int, first_column: int, w: NDArray[np.float32]) -> None:
        """Write w [N, K] to one layer's columns from first_column (a multiple of 16) on."""
        exact = store(self._team, self.stack, layer, first_column, w, only_exact=self._only_exact)
        if self._only_exact and not exact:
            assert isinstance(self.stack, Int8Panels)  # float32 is exact
            self.stack = dequantise_stack(self._team, self.stack, self._stored)
            store(self._team, self.stack, layer, first_column, w)
        self._stored.append((layer, first_column, first_column + len(w)))


def integer_form() -> str:
    """The form of products in integers that this machine computes. Raises ConfigError if it computes none exactly."""
    form = active_form()
    if form is None:
        raise ConfigError(
            "engine.cpu.compute is int8, but no form of its products gives the reference's bits on this processor; set "
            "it to float32"
        )
    return form


def stacks_for_integers(model: str, stacks: dict[str, Stack], max_rows: Mapping[str, int]) -> dict[str, Stack]:
    """The same stacks with those in 8 bits laid out for products in integers.

    max_rows: the most rows that a product with a stack has, by its name; stacks without an entry keep float32 products.
    `stacks` is emptied on the way. Raises ConfigError if there is nothing to compute in integers, or no way to.
    """
    form = integer_form()
    depths = {name: stack.levels.shape[2] for name, stack in stacks.items() if isinstance(stack, Int8Panels)}
    chosen = depths.keys() & max_rows.keys()
    if not chosen:
        raise ConfigError(
            f"engine.cpu.compute is int8, but none of the projections of {model!r} can be stored in 8 bits without "
            "loss; set engine.cpu.weight_dtype to int8 to round them, or compute to float32"
        )
    rows = new_rows(max(max_rows[name] * -(-depths[name] // GROUP) * GROUP for name in chosen))
    converted: dict[str, Stack] = {}
    for name in list(stacks):
        stack = stacks.pop(name)
        converted[name] = pack_dot(stack, form, rows) if name in chosen and isinstance(stack, Int8Panels) else stack
    _LOGGER.info("%s: products in integers (%s): %s", model, form, ", ".join(sorted(chosen)))
    return converted
