"""Experts on a device, in both forms: equal to the definitions of routing and of the mixture; nothing leaks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.lora_rows import ExpertRows
from app.kernels.moe_lora import reference
from app.kernels.moe_lora import triton as triton_lora
from app.kernels.moe_routing import reference as routing
from app.kernels.moe_routing import triton as triton_routing
from app.kernels.moe_routing.pairs import SortedPairs
from tests.kernels.cases import normal, spaced_logits
from tests.kernels.tensors import DEVICE, DTYPES, TOLERANCE, error, numpy, tensor
from tests.kernels.torch_forms import moe_lora as torch_lora
from tests.kernels.torch_forms import moe_routing as torch_routing
from tests.pairwise import pairwise
from tests.seeds import rng

Ranks = NDArray[np.int64]
HIDDEN, INNER, EXPERTS, CHOICES, SLOTS, MAX_RANK = 40, 24, 5, 2, 5, 20
#: Addresses are read on the host by the plain form: it is for the CPU.
FORMS = ["triton"] if DEVICE.type == "cuda" else ["torch", "triton"]


class Form(NamedTuple):
    """The kernels of one form."""

    lora: Any
    routing: Any


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return form_of(request.param)


def form_of(name: str) -> Form:
    return Form(triton_lora, triton_routing) if name == "triton" else Form(torch_lora, torch_routing)


class Addressed(NamedTuple):
    """One product's rows: what the definition gets, what the kernels get, and the memory that they lie in."""

    arrays: reference.ExpertRows
    rows: ExpertRows
    held: list[torch.Tensor]


def random_ranks(generator: np.random.Generator, num_modules: int) -> Ranks:
    """[SLOTS, EXPERTS, num_modules]: a rank per expert, some experts and modules left alone."""
    ranks = generator.choice([0, 1, 5, 16, MAX_RANK], (SLOTS, EXPERTS, 1)).repeat(num_modules, axis=2)
    ranks[generator.random(ranks.shape) < 0.2] = 0
    ranks[0] = 0
    return ranks


def addressed(
    generator: np.random.Generator, depth: int, widths: tuple[int, ...], dtype: torch.dtype, ranks: Ranks | None = None
) -> Addressed:
    """Adapters of these or of random ranks, each matrix in memory of its own; what lies behind it is NaN."""
    ranks = random_ranks(generator, len(widths)) if ranks is None else ranks
    starts = np.concatenate([[0], np.cumsum(ranks.max(axis=2))])
    a, b = np.zeros((len(widths), starts[-1], depth)), np.zeros((starts[-1], sum(widths)))
    at, held = [np.zeros(ranks.shape, np.int64) for _ in range(2)], []
    for place in np.ndindex(ranks.shape):
        adapter_slot, expert, n = place
        start, rank = starts[adapter_slot * EXPERTS + expert], int(ranks[place])
        columns = slice(sum(widths[:n]), sum(widths[: n + 1]))
        of_a = tensor(normal(generator, rank, depth) / depth**0.5, dtype)
        of_b = tensor(normal(generator, rank, widths[n]) / max(rank, 1) ** 0.5, dtype)
        for table, values in zip(at, (of_a, of_b), strict=True):
            memory = torch.full((values.numel() + 64,), torch.nan, dtype=dtype, device=DEVICE)
            memory[: values.numel()] = values.flatten()
            table[place] = memory.data_ptr() if rank else 0
            held.append(memory)
        a[n, start : start + rank], b[start : start + rank, columns] = numpy(of_a), numpy(of_b)
    row_starts = starts[:-1].reshape(SLOTS, EXPERTS)
    rows = ExpertRows(tensor(at[0]), tensor(at[1]), tensor(ranks.astype(np.int32)), depth, widths[0])
    return Addressed(reference.ExpertRows(a, b, widths, row_starts, ranks), rows, held)


def silu(gate: NDArray[np.float64]) -> NDArray[np.float64]:
    return gate / (1 + np.exp(-gate))


def sorted_pairs(form: Form, experts: NDArray[np.int64], dtype: torch.dtype) -> SortedPairs:
    found: SortedPairs = form.routing.sort_pairs(tensor(experts, torch.int32), EXPERTS, form.routing.block_rows(dtype))
    return found


def check_mixture(
    form: Form, generator: np.random.Generator, slots: list[int], first: Addressed, second: Addressed,
    experts: NDArray[np.int64], dtype: torch.dtype,
) -> None:  # fmt: skip
    num_tokens, num_pairs = len(slots), len(slots) * CHOICES
    x = tensor(normal(generator, num_tokens, HIDDEN), dtype)
    gate_up = tensor(normal(generator, EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5, dtype)
    down = tensor(normal(generator, EXPERTS, HIDDEN, INNER) / INNER**0.5, dtype)
    topk_weights = generator.random((num_tokens, CHOICES)).astype(np.float32)
    on_device, pairs = tensor(np.array(slots, np.int32)), sorted_pairs(form, experts, dtype)

    both = torch.full((num_pairs, 2 * INNER), torch.nan, dtype=dtype, device=DEVICE)
    form.lora.expert_linear(x, gate_up, both, pairs, x_divisor=CHOICES)
    before = both.clone()
    form.lora.add_lora(x, both, first.rows, on_device, pairs, max_rank=MAX_RANK, x_divisor=CHOICES)
    is_left = (first.arrays.ranks[np.repeat(slots, CHOICES).astype(int), experts.flatten()] == 0).all(axis=1)
    assert torch.equal(both[tensor(is_left)], before[tensor(is_left)])
    gate, up = both.float().chunk(2, dim=1)
    gated = (torch.nn.functional.silu(gate) * up).to(dtype)
    outputs = torch.full((num_pairs, HIDDEN), torch.nan, dtype=dtype, device=DEVICE)
    form.lora.expert_linear(gated, down, outputs, pairs)
    form.lora.add_lora(gated, outputs, second.rows, on_device, pairs, max_rank=MAX_RANK)
    hidden = torch.zeros(num_tokens, HIDDEN, dtype=dtype, device=DEVICE)
    form.routing.combine(outputs, tensor(topk_weights), hidden)

    expected = reference.mixture(
        numpy(x), numpy(gate_up), numpy(down), experts, topk_weights, np.array(slots, np.int32),
        first.arrays, second.arrays, silu,
    )  # fmt: skip
    assert error(hidden, expected) < TOLERANCE[dtype], dtype


def chosen(generator: np.random.Generator, num_tokens: int) -> NDArray[np.int64]:
    """[T, CHOICES], different experts of each token."""
    rows = [generator.permutation(EXPERTS)[:CHOICES] for _ in range(num_tokens)]
    return np.array(rows, np.int64).reshape(-1, CHOICES)


@pytest.mark.parametrize("slots", [[], [0, 0, 0], [3], [2] * 11, [1, 2, 3, 4, 0, 4, 1, 4, 2]])
def test_equals_the_mixture(form: Form, slots: list[int]) -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    first, second = addressed(generator, HIDDEN, (INNER, INNER), dtype), addressed(generator, INNER, (HIDDEN,), dtype)
    check_mixture(form, generator, slots, first, second, chosen(generator, len(slots)), dtype)


def _ranks(which: str) -> tuple[Ranks, Ranks]:
    """Of gate/up [SLOTS, EXPERTS, 2] and of down [SLOTS, EXPERTS, 1]; the base has none."""
    gate_up, down = np.zeros((SLOTS, EXPERTS, 2), np.int64), np.zeros((SLOTS, EXPERTS, 1), np.int64)
    if which == "one expert of one adapter":
        gate_up[2, 1], down[2, 1] = 5, 5
    elif which == "a rank of its own per expert":
        gate_up[1:] = np.array([1, MAX_RANK, 7, 16, 3])[:, None]
        down[1:] = np.array([MAX_RANK, 1, 16, 2, 9])[:, None]
    elif which == "gate only":
        gate_up[1:, :, 0] = 6
    elif which == "up only":
        gate_up[1:, :, 1] = 6
    return gate_up, down


@pytest.mark.parametrize(
    "which", ["one expert of one adapter", "a rank of its own per expert", "gate only", "up only", "nothing"]
)
def test_an_adapter_may_leave_alone_what_it_likes(form: Form, which: str) -> None:
    """Adapters all at once and the base between them; one expert is chosen by every token, one by none."""
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    slots = [2, 1, 0, 2, 3, 4, 2]
    experts = np.array([[1, other] for other in (0, 2, 3, 0, 2, 3, 0)], np.int64)
    experts[::2] = experts[::2, ::-1]
    ranks = _ranks(which)
    first = addressed(generator, HIDDEN, (INNER, INNER), dtype, ranks[0])
    second = addressed(generator, INNER, (HIDDEN,), dtype, ranks[1])
    check_mixture(form, generator, slots, first, second, experts, dtype)


def test_more_rows_than_a_tile_has_and_biases(form: Form) -> None:
    generator = rng()
    experts = np.array([[1, 0]] * 19 + [[3, 1]] * 20, np.int64)
    x, bias = normal(generator, 39, HIDDEN), normal(generator, EXPERTS, INNER)
    weight = normal(generator, EXPERTS, INNER, HIDDEN)
    pairs = sorted_pairs(form, experts, torch.float32)
    out = torch.full((78, INNER), torch.nan, device=DEVICE)
    form.lora.expert_linear(tensor(x), tensor(weight), out, pairs, tensor(bias), x_divisor=CHOICES)
    of_pair = experts.flatten()
    expected = np.einsum("ph,pih->pi", x.repeat(CHOICES, 0).astype(np.float64), weight[of_pair]) + bias[of_pair]
    assert error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.usefixtures("rows_of_products_alike")
def test_a_token_has_the_same_bits_alone_and_in_any_batch(form: Form) -> None:
    """Rows of others may be numbers that are none: padding of a captured step holds anything."""
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    given = addressed(generator, HIDDEN, (INNER, INNER), dtype)
    weight = tensor(normal(generator, EXPERTS, 2 * INNER, HIDDEN), dtype)
    num_tokens, at = 30, int(generator.integers(30))
    slots = generator.integers(0, SLOTS, num_tokens).astype(np.int32)
    logits = tensor(normal(generator, num_tokens, EXPERTS), dtype)
    x = tensor(normal(generator, num_tokens, HIDDEN), dtype)
    other = (at + 1) % num_tokens
    x[other], logits[other] = torch.nan, torch.nan

    def computed(part: slice) -> list[torch.Tensor]:
        count = len(range(*part.indices(num_tokens)))
        experts = torch.empty(count, CHOICES, dtype=torch.int32, device=DEVICE)
        topk_weights, hidden = torch.empty(count, CHOICES, device=DEVICE), x[part].clone()
        form.routing.route(logits[part], experts, topk_weights, normalised=True)
        pairs = form.routing.sort_pairs(experts, EXPERTS, form.routing.block_rows(dtype))
        out = torch.empty(count * CHOICES, 2 * INNER, dtype=dtype, device=DEVICE)
        form.lora.expert_linear(x[part], weight, out, pairs, x_divisor=CHOICES)
        form.lora.add_lora(x[part], out, given.rows, tensor(slots[part]), pairs, max_rank=MAX_RANK, x_divisor=CHOICES)
        form.routing.combine(out[:, :HIDDEN].contiguous(), topk_weights, hidden)
        return [experts, topk_weights, out.unflatten(0, (count, CHOICES)), hidden]

    for whole, alone in zip(computed(slice(0, num_tokens)), computed(slice(at, at + 1)), strict=True):
        assert torch.equal(whole[at], alone[0])


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
def test_routing_equals_its_definition(form: Form, groups: tuple[int, int], normalised: bool) -> None:
    logits, top_k = spaced_logits(rng(), 23, 9), 3
    experts = torch.empty(23, top_k, dtype=torch.int32, device=DEVICE)
    topk_weights = torch.empty(23, top_k, device=DEVICE)
    settings: dict[str, Any] = {"num_groups": groups[0], "top_groups": groups[1], "scale": 1.5}
    form.routing.route(tensor(logits), experts, topk_weights, normalised=normalised, **settings)
    expected = routing.route(logits, top_k, normalised=normalised, **settings)
    assert experts.tolist() == expected.experts.tolist()
    assert error(topk_weights, expected.topk_weights) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_ties_are_broken_by_index_and_numbers_that_are_none_choose_the_first(form: Form) -> None:
    logits = np.array([[1, 2, 2, 1, 2], [0] * 5, [np.nan] * 5, [3, np.nan, 0, 0, 0]], np.float32)
    experts = torch.empty(4, 3, dtype=torch.int32, device=DEVICE)
    form.routing.route(tensor(logits), experts, torch.empty(4, 3, device=DEVICE), normalised=False)
    assert experts.tolist() == [[1, 2, 4], *[[0, 1, 2]] * 3]
    best = np.array([[0, 0, 7, 7, 7, 7]], np.float32)  # of equal groups the lower
    experts = torch.empty(1, 2, dtype=torch.int32, device=DEVICE)
    form.routing.route(
        tensor(best), experts, torch.empty(1, 2, device=DEVICE), normalised=False, num_groups=3, top_groups=1
    )
    assert experts.tolist() == [[2, 3]]


@pytest.mark.parametrize("block_rows", [16, 64])
def test_every_pair_is_in_one_tile_of_its_expert(form: Form, block_rows: int) -> None:
    generator = rng()
    for num_tokens, num_experts, top_k in ((1, 3, 1), (1, 9, 8), (65, 5, 3), (150, 40, 2), (400, 2, 2)):
        choices = [generator.permutation(num_experts)[:top_k] for _ in range(num_tokens)]
        experts = tensor(np.array(choices), torch.int32)
        order, tiles, _, _ = form.routing.sort_pairs(experts, num_experts, block_rows)
        assert order.tolist() == torch.sort(experts.flatten(), stable=True).indices.tolist()
        at = 0
        for first, count, expert in [tile for tile in tiles.tolist() if tile[1]]:
            assert first == at
            assert count <= block_rows or form.routing is torch_routing
            assert (experts.flatten()[order[first : first + count].long()] == expert).all()
            at += count
        assert at == num_tokens * top_k


@pairwise({"dtype": DTYPES, "shared": [None, "added", "gated"]}, strength=1)
def test_outputs_are_added_by_their_shares(form: Form, dtype: torch.dtype, shared: str | None) -> None:
    generator = rng()
    outputs, hidden, whole = (tensor(normal(generator, n, 20), dtype) for n in (21, 7, 7))
    topk_weights, gates = (
        tensor(generator.random((7, 3)).astype(np.float32)),
        tensor(30 * normal(generator, 7, 1), dtype),
    )
    expected = numpy(hidden) + (numpy(outputs).reshape(7, 3, 20) * numpy(topk_weights)[:, :, None]).sum(axis=1)
    factor = 1 / (1 + np.exp(-numpy(gates))) if shared == "gated" else 1.0
    expected += 0 if shared is None else numpy(whole) * factor
    form.routing.combine(
        outputs, topk_weights, hidden, None if shared is None else whole, gates if shared == "gated" else None
    )
    assert error(hidden, expected) < TOLERANCE[dtype]


def test_operands_that_do_not_fit_are_refused() -> None:
    form, generator = form_of("triton"), rng()
    rows = addressed(generator, HIDDEN, (INNER,), torch.float32).rows  # nobody reads them
    pairs = sorted_pairs(form, chosen(generator, 3), torch.float32)
    x, y, slots = torch.zeros(3, HIDDEN), torch.zeros(3 * CHOICES, INNER), torch.zeros(3, dtype=torch.int32)
    for wrong in ((x[1:], y, rows, slots), (x, y[1:], rows, slots), (x, y, rows._replace(depth=7), slots)):
        with pytest.raises(ValueError, match="do not fit"):
            form.lora.add_lora(*wrong, pairs, max_rank=MAX_RANK, x_divisor=CHOICES)
    with pytest.raises(ValueError, match="adapter slots"):
        form.lora.add_lora(x, y, rows, slots[1:], pairs, max_rank=MAX_RANK, x_divisor=CHOICES)
    with pytest.raises(ValueError, match="do not fit"):
        form.routing.route(torch.zeros(3, 5), torch.zeros(3, 6, dtype=torch.int32), torch.zeros(3, 6), normalised=True)
    with pytest.raises(ValueError, match="do not fit"):
        form.routing.combine(y, torch.zeros(2, 2), torch.zeros(2, INNER))
