"""LoRA on tensors, every form: equal to the definition in float64 for any mix of ranks; base rows and poison untouched.

Without a GPU Triton's forms run in its interpreter (tests/conftest.py), with one on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.bgmv import triton as bgmv
from app.kernels.lora_rows import RankRows
from app.kernels.sgmv import triton as sgmv
from tests.kernels.cases import normal
from tests.kernels.tensors import DEVICE, DTYPES, TOLERANCE, error, tensor
from tests.kernels.torch_forms import bgmv as plain_bgmv
from tests.kernels.torch_forms import sgmv as plain_sgmv
from tests.kernels.triton.tables import MAX_RANK, NUM_SLOTS, random_tables
from tests.pairwise import pairwise
from tests.seeds import rng

#: No multiple of a tile, and enough for more than one split.
DEPTH = 300
SHAPES = {"q/k/v": (48, 16, 20), "gate/up": (40, 40), "one": (33,)}
#: (rows, adapter slot) of every run.
CASES = {
    "no rows": [],
    "one row": [(1, 3)],
    "only the base": [(9, 0)],
    "one adapter for all": [(19, 5)],
    "a different adapter each": [(1, s) for s in range(NUM_SLOTS)],
    "rank 1 beside the largest": [(3, 1), (5, 5), (1, 0), (2, 1)],
    "sizes that divide nothing": [(9, 2), (3, 4), (1, 0), (17, 5), (2, 3)],
}
Case = list[tuple[int, int]]


def slots_of(case: Case) -> NDArray[np.int32]:
    return np.repeat([s for _, s in case], [n for n, _ in case]).astype(np.int32)


def run_bgmv(x: torch.Tensor, y: torch.Tensor, rows: RankRows, case: Case, *, module: ModuleType = bgmv) -> None:
    module.add_lora(x, y, rows, tensor(slots_of(case)), max_rank=MAX_RANK)


def run_sgmv(
    x: torch.Tensor,
    y: torch.Tensor,
    rows: RankRows,
    case: Case,
    *,
    batch_invariant: bool = False,
    max_rank: int = MAX_RANK,
    module: ModuleType = sgmv,
) -> None:
    """With unused segments at the end, as in a CUDA graph's bucket."""
    starts = np.cumsum([0, *(n for n, _ in case)])
    cut = module.block_tokens(len(x), batch_invariant=batch_invariant)
    found = module.segments(starts, np.array([s for _, s in case], np.int32), cut)
    assert len(found) <= module.max_segments(len(x), len(case), cut)
    padded = np.concatenate([found, np.zeros((2, 3), np.int32)])
    module.add_lora(x, y, rows, tensor(padded), max_rank=max_rank, block_tokens=cut, batch_invariant=batch_invariant)


#: Triton's, in which operands may lie anywhere in a device's memory.
FORMS: dict[str, Callable[..., None]] = {
    "bgmv": run_bgmv,
    "sgmv": run_sgmv,
    "sgmv deterministic": partial(run_sgmv, batch_invariant=True),
}
ALL_FORMS = FORMS | {
    "bgmv, torch": partial(run_bgmv, module=plain_bgmv),
    "sgmv, torch": partial(run_sgmv, module=plain_sgmv),
    "sgmv deterministic, torch": partial(run_sgmv, module=plain_sgmv, batch_invariant=True),
}


@pairwise({"form": ALL_FORMS, "name": CASES}, strength=1)
def test_equals_the_definition(form: str, name: str) -> None:
    """Type and slices are drawn: all of them together take minutes in the interpreter."""
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    case = [(min(count, 2) if form.startswith("bgmv") else count, s) for count, s in CASES[name]]  # bgmv knows no runs
    shape = str(generator.choice(list(SHAPES)))
    tables = random_tables(generator, DEPTH, SHAPES[shape], dtype)
    slots = slots_of(case)
    x = tensor(normal(generator, len(slots), DEPTH), dtype)
    # Rows and columns beyond the operands, which must stay as they are.
    memory = torch.full((len(slots) + 2, sum(SHAPES[shape]) + 3), torch.nan, dtype=dtype, device=DEVICE)
    y = memory[: len(slots), : sum(SHAPES[shape])]
    y.copy_(tensor(normal(generator, *y.shape), dtype))
    before = y.clone()
    ALL_FORMS[form](x, y, tables.rows, case)
    assert error(y, tables.expected(x, before, slots)) < TOLERANCE[dtype], (shape, dtype)
    of_base = torch.from_numpy(slots == 0).to(DEVICE)
    assert torch.equal(y[of_base], before[of_base])
    assert torch.isnan(memory[len(slots) :]).all()
    assert torch.isnan(memory[:, y.shape[1] :]).all()


@pytest.mark.usefixtures("rows_of_products_alike")
@pytest.mark.parametrize("module", [sgmv, plain_sgmv], ids=["triton", "torch"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(module: ModuleType) -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    run = partial(run_sgmv, module=module, batch_invariant=True)
    tables = random_tables(generator, DEPTH, SHAPES["gate/up"], dtype)
    width = sum(SHAPES["gate/up"])
    for adapter in generator.permutation(np.arange(1, NUM_SLOTS))[:2].tolist():
        row, base = tensor(normal(generator, 1, DEPTH), dtype), tensor(normal(generator, 1, width), dtype)
        alone = base.clone()
        run(row, alone, tables.rows, [(1, adapter)])
        for _ in range(2):
            case = [(int(generator.integers(1, 20)), int(generator.integers(NUM_SLOTS))) for _ in range(2)]
            case.insert(int(generator.integers(3)), (int(generator.integers(1, 20)), adapter))
            slots = slots_of(case)
            x = tensor(normal(generator, len(slots), DEPTH), dtype)
            y = tensor(normal(generator, len(slots), width), dtype)
            at = int(generator.choice(np.flatnonzero(slots == adapter)))
            x[at], y[at] = row[0], base[0]
            run(x, y, tables.rows, case, max_rank=MAX_RANK + 16 * int(generator.integers(9)))
            assert torch.equal(y[at], alone[0]), f"adapter {adapter}, row {at} of {case}"


@pytest.mark.parametrize("form", [bgmv.add_lora, sgmv.add_lora])
def test_operands_that_do_not_fit_are_refused(form: object) -> None:
    tables = random_tables(rng(), DEPTH, SHAPES["one"], torch.float32)
    x, y = torch.zeros(4, DEPTH, device=DEVICE), torch.zeros(4, 33, device=DEVICE)
    work = tensor(np.zeros(4, np.int32)) if form is bgmv.add_lora else tensor(np.zeros((4, 3), np.int32))
    further = {} if form is bgmv.add_lora else {"block_tokens": 16}
    for wrong_x, wrong_y, rows in (
        (x[:, 1:], y, tables.rows),
        (x[:3], y, tables.rows),
        (x, y[:, 1:], tables.rows),
        (x.half(), y, tables.rows),
        (x.T.contiguous().T, y, tables.rows),
        (x, y, tables.rows._replace(b_starts=tables.rows.b_starts[1:])),
        (x, y, tables.rows._replace(ranks=tables.rows.ranks.repeat(1, 2))),
        (x, y, tables.rows._replace(memory=tables.rows.memory[::2])),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            form(wrong_x, wrong_y, rows, work, max_rank=MAX_RANK, **further)  # type: ignore[operator]


@pytest.mark.parametrize("module", [sgmv, plain_sgmv], ids=["triton", "torch"])
def test_segments_cover_the_runs_of_adapters(module: ModuleType) -> None:
    generator = rng()
    for _ in range(50):
        lengths = generator.integers(1, 70, int(generator.integers(0, 12)))
        adapters = generator.integers(0, 4, len(lengths))
        cut = int(generator.choice([16, 32, 64]))
        found = module.segments(np.cumsum([0, *lengths]), adapters, cut)
        assert ((found[:, 1] > 0) & (found[:, 1] <= cut)).all()
        assert len(found) <= module.max_segments(int(lengths.sum()), len(lengths), cut)
        slots = np.zeros(lengths.sum(), np.int32)
        for first, count, adapter in found.tolist():
            assert not slots[first : first + count].any()
            slots[first : first + count] = adapter
        assert np.array_equal(slots, np.repeat(adapters, lengths))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_an_adapter_may_end_where_the_memory_ends(form: str) -> None:
    """Its rank is less than the step's bound: nothing behind the memory is read, and nothing of a neighbour's."""
    generator = rng()
    tables = random_tables(generator, DEPTH, SHAPES["one"], torch.float32)
    rows = tables.rows
    ends = torch.maximum(rows.a_starts + rows.ranks * DEPTH, rows.b_starts + rows.ranks * 33)
    (last,) = torch.nonzero(ends[:, 0] == len(rows.memory))[:, 0].tolist()
    case: Case = [(1, last), (1, 1), (1, last)]
    x, y = tensor(normal(generator, 3, DEPTH)), tensor(normal(generator, 3, 33))
    before = y.clone()
    ALL_FORMS[form](x, y, rows, case)
    assert error(y, tables.expected(x, before, slots_of(case))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_another_adapters_delta_would_be_seen(form: str) -> None:
    generator = rng()
    tables = random_tables(generator, DEPTH, SHAPES["one"], torch.float32)
    x, y = tensor(normal(generator, 2, DEPTH)), tensor(normal(generator, 2, 33))
    before = y.clone()
    ALL_FORMS[form](x, y, tables.rows, [(1, 2), (1, 3)])
    for wrong in ([3, 2], [2, 2], [0, 3], [2, 0]):
        assert error(y, tables.expected(x, before, np.array(wrong))) > 100 * TOLERANCE[torch.float32]
