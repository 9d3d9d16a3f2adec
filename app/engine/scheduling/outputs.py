"""What a step's output means for one sequence: its embedding, its log-probabilities, or its overflow error.

Pure functions, except that `pool_output` stores the sums in the sequence.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardOutput
from app.engine.errors import AdapterOverflow, EngineFailure
from app.engine.request import PoolingParams, TokenLogprobs
from app.engine.sequence import Sequence


def pool_output(sequence: Sequence, output: ForwardOutput, index: int, *, is_complete: bool) -> bytes | None:
    """Store a step's sums. Returns the embedding when complete, b"" before, None if it is not finite."""
    assert sequence.pooling is not None
    assert output.sums is not None, "the backend has added up what was to be pooled"
    sequence.pooled_sums = output.sums[index]
    return embedding(sequence.pooled_sums, sequence.num_tokens, sequence.pooling) if is_complete else b""


def overflow_error(sequence: Sequence) -> Exception:
    """The error of a sequence whose next token or embedding is not a finite number."""
    where = f"is not a finite number after {sequence.num_tokens} tokens"
    adapter = sequence.request.adapter
    if adapter is None:
        return EngineFailure(f"the output of the base model {where}")
    return AdapterOverflow(
        f"the output of adapter {adapter.name!r} {where}: its values are too large; lower alpha or train it again"
    )


def logprobs_of(output: ForwardOutput, first_row: int, token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    lines = []
    for row, token_id in enumerate(token_ids, first_row):
        top = output.top_logprobs[row]
        pairs = () if top is None else tuple(zip(top[0].tolist(), top[1].tolist(), strict=True))
        lines.append(TokenLogprobs(token_id, float(output.logprobs[row]), pairs))
    return tuple(lines)


def embedding(sums: NDArray[np.float64], num_tokens: int, params: PoolingParams) -> bytes | None:
    """The embedding of a text of `num_tokens`, as little-endian float32, from the sums [H] over its pooled rows.

    None if a number is not finite. A zero vector stays as it is. The length is an exact sum, rounded once.
    """
    kept = sums[: params.num_dimensions] / (num_tokens if params.method == "mean" else 1)
    if not np.isfinite(kept).all():
        return None
    length = math.sqrt(math.fsum((kept * kept).tolist()))
    return (kept / length if length > 0 else kept).astype("<f4").tobytes()
