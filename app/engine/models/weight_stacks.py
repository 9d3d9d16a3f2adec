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
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels, Stack
from app.kernels.matmul.pack_weights import dequantise_stack, empty_stack, store

_LOGGER = logging.getLogger(__name__)


class StackWriter:
    """One stack while it is filled."""

    def __init__(self, shape: tuple[int, int, int], weight_dtype: WeightDtype, team: ThreadTeam) -> None:
        """shape: layers, columns, depth."""
        self._team = team
        self._only_exact = weight_dtype == "auto"
        self._stored: list[tuple[int, int, int]] = []
        self.stack: Stack = empty_stack(*shape, quantised=weight_dtype != "float32")

    def store(self, layer: int, first_column: int, w: NDArray[np.float32]) -> None:
        """Write w [N, K] to one layer's columns from first_column (a multiple of 16) on."""
        exact = store(self._team, self.stack, layer, first_column, w, only_exact=self._only_exact)
        if self._only_exact and not exact:
            assert isinstance(self.stack, Int8Panels)  # float32 is exact
            self.stack = dequantise_stack(self._team, self.stack, self._stored)
            store(self._team, self.stack, layer, first_column, w)
        self._stored.append((layer, first_column, first_column + len(w)))


def log_storage(model: str, stacks: Mapping[str, Stack]) -> None:
    """Log at start which modules are in float32, so that an operator sees what `auto` chose."""
    wide = [name for name, stack in stacks.items() if not isinstance(stack, Int8Panels)]
    _LOGGER.info("%s: base weights in float32: %s; the others in 8 bits", model, ", ".join(wide) or "none")
