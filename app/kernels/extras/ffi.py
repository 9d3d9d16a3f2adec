"""The addresses of adapters' extras as one argument of XLA programs: a vector of words, each two int32.

In: `ExtraTables` on the host. Out: a vector of one length for a model and its adapter slots, whatever adapters hold, so
that no adapter compiles anything; in a kernel, the tables again. Nothing is read before a piece of work is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.kernels.extras.cpu import ExtraTables
from app.kernels.machine.compiled import compiled
from app.kernels.xla_call import words

_MODULES, _NORMS = 7, 4
#: Tables with one word per adapter slot.
_BY_SLOT = len(ExtraTables._fields) - 4


def packed_tables(tables: ExtraTables) -> NDArray[np.int32]:
    """The vector. What the addresses point to must live while programs read it."""
    return np.concatenate([table.reshape(-1) for table in tables]).view(np.int32)


@compiled
def tables_of(address, num_layers, num_slots):
    """The `ExtraTables` of the vector at `address`."""
    step = num_layers * num_slots * 8
    by_module, by_norm = (num_layers, num_slots, _MODULES), (num_layers, num_slots, _NORMS)
    norms = address + 3 * step * _MODULES
    slots = words(norms + step * _NORMS, (_BY_SLOT, num_slots))
    return ExtraTables(
        words(address, by_module), words(address + step * _MODULES, by_module),
        words(address + 2 * step * _MODULES, by_module), words(norms, by_norm),
        slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7], slots[8], slots[9], slots[10],
        slots[11], slots[12], slots[13],
    )  # fmt: skip
