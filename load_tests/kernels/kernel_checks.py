"""Checks of every kernel on this device: against float64, and bit for bit in batch-invariant mode.

One line per form and type: its error, and whether that passes. On the CPU the kernels run in Triton's interpreter on
tiny operands, without bfloat16, which it gets wrong. An exception is a failed check with its message: one form that
does not compile must not cost a short run on a GPU everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from app.kernels.matmul import triton as matmul
from app.kernels.paged_attention import triton as attention
from app.kernels.sgmv import triton as sgmv
from load_tests.kernels import lora_forms
from load_tests.kernels.lora_forms import TOLERANCE, Sizes, Workload

Line = dict[str, Any]


def attempt(line: Line, measurement: Callable[[], Line]) -> Line:
    """line with what the measurement adds to it, or with the message of what it raised."""
    try:
        return line | measurement()
    except Exception as error:  # whatever a compiler or driver may raise: it is reported and counts as failed
        return line | {"failure": f"{type(error).__name__}: {error}"[:500], "passed": False}


def checks(device: torch.device) -> Iterator[Line]:
    """Every form on sizes that divide nothing, in every type; what the deterministic forms promise, by bits."""
    small = device.type == "cpu"
    dtypes = (torch.float32, torch.float16) if small else (torch.float32, torch.float16, torch.bfloat16)
    depth, width, rows = (72, 40, 7) if small else (1000, 2056, 77)
    for dtype, num_rows in product(dtypes, (1, rows)):
        workload = Workload(Sizes(depth, width, (8, 1, 64, 20), num_rows, min(num_rows, 5)), 1, dtype, device)
        for name in lora_forms.FORMS:
            line: Line = {"kind": "check", "form": name, "dtype": str(dtype), "sizes": workload.sizes.name}
            yield attempt(line, partial(_lora, workload, name))
    for dtype, batch_invariant in product(dtypes, (False, True)):
        line = {"kind": "check", "form": "attention", "dtype": str(dtype), "deterministic": batch_invariant}
        yield attempt(line, partial(_attention, dtype, device, small, batch_invariant))
    if not small:  # rows of the interpreter's products differ by place; the tests patch that
        for dtype, (name, bits) in product(
            dtypes, {"LoRA": _lora_bits, "attention": _attention_bits, "product": _product_bits}.items()
        ):
            line = {"kind": "check", "form": f"bits of {name}", "dtype": str(dtype)}
            yield attempt(line, partial(_none_different, bits, dtype, device))


def attention_case(
    dtype: torch.dtype, device: torch.device, num_sequences: int, num_queries: int, length: int, dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(q, keys, values, the other arguments): sequences of equal lengths in shuffled blocks of 16; heads 32 on 8."""
    num_blocks = -(-length // 16)
    tables = torch.randperm(num_sequences * num_blocks, device=device).view(num_sequences, num_blocks).int()
    keys, values = (torch.randn(tables.numel(), 8, 16, dim, device=device).to(dtype) for _ in range(2))
    q = torch.randn(num_sequences * num_queries, 32, dim, device=device).to(dtype)
    arguments = {
        "query_starts": torch.arange(num_sequences + 1, device=device, dtype=torch.int32) * num_queries,
        "seq_lens": torch.full((num_sequences,), length, device=device, dtype=torch.int32),
        "block_tables": tables,
        "scale": dim**-0.5,
        "max_query_len": num_queries,
        "max_seq_len": length,
    }
    return q, keys, values, arguments


def dense(cache: torch.Tensor, tables: torch.Tensor, length: int) -> torch.Tensor:
    """[B, 8, length, D]: the keys or values of every sequence in one piece."""
    return cache[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :length]


def _lora(workload: Workload, name: str) -> Line:
    error = lora_forms.check(workload, lora_forms.FORMS[name](workload))
    return {"error": error, "passed": error < TOLERANCE[workload.x.dtype]}


def _attention(dtype: torch.dtype, device: torch.device, small: bool, batch_invariant: bool) -> Line:
    num_sequences, num_queries, length, dim = (1, 5, 40, 16) if small else (3, 70, 1500, 128)
    q, keys, values, arguments = attention_case(dtype, device, num_sequences, num_queries, length, dim)
    out = torch.full_like(q, torch.nan)
    attention.paged_attention(q, keys, values, out=out, batch_invariant=batch_invariant, **arguments)
    k, v = (dense(t, arguments["block_tables"], length).double().repeat_interleave(4, 1) for t in (keys, values))
    queries = q.view(num_sequences, num_queries, 32, dim).transpose(1, 2).double()
    position = torch.arange(length, device=device)
    seen = position[None, :] <= position[length - num_queries :, None]
    scores = (queries @ k.transpose(2, 3) * arguments["scale"]).masked_fill(~seen, -torch.inf)
    error = lora_forms.relative_error(out, (scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape))
    return {"error": error, "passed": error < TOLERANCE[dtype]}


def _none_different(
    count_different: Callable[[torch.dtype, torch.device], int], dtype: torch.dtype, device: torch.device
) -> Line:
    num_different = count_different(dtype, device)
    return {"error": float(num_different), "passed": num_different == 0}


def _lora_bits(dtype: torch.dtype, device: torch.device) -> int:
    """How many of some rows of a batch differ from the same rows alone."""
    workload = Workload(Sizes(4096, 1024, (16,), 70, 1), 1, dtype, device)
    together = workload.y[0].clone()
    lora_forms.FORMS["deterministic"](workload)(0, together)
    segment, different = torch.tensor([[0, 1, 1]], dtype=torch.int32, device=device), 0
    for row in (0, 7, 15, 16, 69):
        alone = workload.y[0, row : row + 1].clone()
        sgmv.add_lora(
            workload.x[0, row : row + 1], alone, workload.rows[0], segment, max_rank=16,
            block_tokens=sgmv.MIN_BLOCK_TOKENS, batch_invariant=True,
        )  # fmt: skip
        different += int(not torch.equal(alone[0], together[row]))
    return different


def _attention_bits(dtype: torch.dtype, device: torch.device) -> int:
    """Queries of a prompt's chunk compared with the same ones decoded alone, over three splits of keys."""
    q, keys, values, arguments = attention_case(dtype, device, 1, 70, 1500)
    chunk, one, different = torch.empty_like(q), torch.empty_like(q[:1]), 0
    attention.paged_attention(q, keys, values, out=chunk, batch_invariant=True, **arguments)
    for row in (0, 33, 69):
        single = arguments | {
            "query_starts": torch.tensor([0, 1], dtype=torch.int32, device=device),
            "seq_lens": torch.tensor([1500 - 69 + row], dtype=torch.int32, device=device),
            "max_query_len": 1,
        }
        attention.paged_attention(q[row : row + 1], keys, values, out=one, batch_invariant=True, **single)
        different += int(not torch.equal(one[0], chunk[row]))
    return different


def _product_bits(dtype: torch.dtype, device: torch.device) -> int:
    x, weight = (torch.randn(rows, 4096, device=device).to(dtype) for rows in (70, 1024))
    whole, alone = (torch.empty(rows, 1024, dtype=dtype, device=device) for rows in (70, 1))
    matmul.linear(x, weight, whole)
    different = 0
    for row in (0, 15, 63, 64, 69):
        matmul.linear(x[row : row + 1], weight, alone)
        different += int(not torch.equal(alone[0], whole[row]))
    return different
