"""The definition: softmax(scale * q K^T) V over the keys a query may see, one query at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def paged_attention(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    query_starts: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Paged attention [T, heads, D] in float64 (Vaswani et al. 2017; GQA: Ainslie et al. 2023).

    q: [T, heads, D]; keys, values: [blocks, kv_heads, block_size, D]; query_starts: [B+1]; seq_lens: [B]; block_tables:
    [B, N]. Query i of a sequence with q queries sees keys [max(0, n - window), n), n = seq_len - q + i + 1. With a
    softcap, a score s becomes softcap * tanh(s / softcap) (Gemma 2). sinks: [heads], one more score of each head that
    has no value (Xiao et al. 2023, as in gpt-oss).
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    out = np.zeros(q.shape, np.float64)
    for b in range(len(seq_lens)):
        table = block_tables[b]
        first, end = int(query_starts[b]), int(query_starts[b + 1])
        for t in range(first, end):
            n = int(seq_lens[b]) - (end - first) + (t - first) + 1
            low = 0 if window is None else max(0, n - window)
            block, offset = table[np.arange(low, n) // keys.shape[2]], np.arange(low, n) % keys.shape[2]
            for head in range(num_heads):
                k = keys[block, head // group, offset].astype(np.float64)
                v = values[block, head // group, offset].astype(np.float64)
                scores = scale * (k @ q[t, head].astype(np.float64))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                p = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
                out[t, head] = (p / (p.sum() + sink)) @ v
    assert num_tokens == int(query_starts[-1])
    return out
