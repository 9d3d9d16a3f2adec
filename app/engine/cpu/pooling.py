"""Hidden states of a step, added up for the texts that are embedded.

In: a `PoolingBatch`, and the states of its rows one range after the other, as the decoder leaves them. Out: the output
of the step with its sums. Rule: rows are added in their order, whoever else is in the step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardOutput, PoolingBatch
from app.kernels.machine.team import Team
from app.kernels.pooling.cpu import add_rows


def rows_of(pooling: PoolingBatch | None) -> NDArray[np.int32]:
    """[N] int32: the rows of all ranges, one range after the other."""
    if pooling is None:
        return np.zeros(0, np.int32)
    return np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in pooling.ranges])


def with_sums(
    output: ForwardOutput, states: NDArray[np.float32], pooling: PoolingBatch | None, team: Team
) -> ForwardOutput:
    """`output` and the sums of states [N, H], the rows that `rows_of` names."""
    if pooling is None:
        return output
    ends = np.cumsum(pooling.ranges[:, 1] - pooling.ranges[:, 0])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return replace(output, sums=added(states, np.stack([starts, ends], axis=1), pooling.sums, team))


def added(
    states: NDArray[np.float32], ranges: NDArray[np.int64], sums: NDArray[np.float64], team: Team
) -> NDArray[np.float64]:
    """The sums [Q, H] with the rows of their ranges [Q, 2] of states [N, H]."""
    total = sums.copy()
    team.run(add_rows, 1, states, ranges, total)
    return total
