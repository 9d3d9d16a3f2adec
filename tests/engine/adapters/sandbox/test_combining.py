"""Combinations made in a reader process: the same bits as in this one, and bounded before and while they are made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining import combine as combine_module
from app.engine.adapters.combining.combination import Combination, CombinationMethod, CombinationPart, make_combination
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.sandbox import validator as validator_module
from app.engine.adapters.sandbox.packing import pack_adapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits
from app.engine.adapters.sandbox.validator import Validator
from app.engine.errors import AdapterReadFailed, AdapterTooLarge, CombinationError
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec

SPEC = tiny_spec()
ADAPTERS = [random_adapter(SPEC, 4, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    validator = Validator()
    yield validator
    validator.close()


def combination(method: CombinationMethod = CombinationMethod()) -> Combination:  # noqa: B008  (frozen)
    parts = [
        CombinationPart(AdapterRef(f"a{index}", f"{index}" * 64, "t"), weight) for index, weight in ((0, 0.5), (1, 2.0))
    ]
    return make_combination(parts, method)


@pytest.mark.parametrize(
    "method",
    [CombinationMethod(), CombinationMethod("dare_linear", density=0.5, seed=3), CombinationMethod("svd", svd_rank=3)],
)
def test_a_combination_is_the_one_that_this_process_makes(validator: Validator, method: CombinationMethod) -> None:
    packed = [pack_adapter(adapter) for adapter in ADAPTERS]
    before = [part.arrays[0].copy() for part in packed]
    made = validator.combine(combination(method), packed, SPEC)
    expected = pack_adapter(combine(combination(method), ADAPTERS, SPEC))
    assert made.card == expected.card
    for array, same in zip(before, packed, strict=True):
        np.testing.assert_array_equal(array, same.arrays[0])
    if method.name == "svd":
        np.testing.assert_allclose(made.arrays[0].view(np.float32), expected.arrays[0].view(np.float32), atol=1e-5)
    else:
        np.testing.assert_array_equal(made.arrays[0], expected.arrays[0])


def test_bytes_ranks_and_products_are_summed_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [pack_adapter(adapter) for adapter in ADAPTERS]
    num_bytes = sum(adapter.card.size_bytes for adapter in ADAPTERS)

    def refused(method: CombinationMethod, match: str, **limits: int) -> None:
        validator = Validator(ReadLimits(**limits))
        monkeypatch.setattr(validator._process, "read", lambda *_: pytest.fail("it was made"))
        with pytest.raises(CombinationError, match=match):
            validator.combine(combination(method), packed, SPEC)
        validator.close()

    refused(CombinationMethod(), f"{num_bytes} bytes together", max_weight_bytes=num_bytes - 1)
    refused(CombinationMethod(), "the ranks add up to 8 but adapters.max_rank is 7", max_rank=7)
    monkeypatch.setattr(combine_module, "MAX_SVD_PRODUCTS", 1000.0)
    for method in (CombinationMethod("svd"), CombinationMethod("ties_svd", density=0.5)):
        refused(method, f"method '{method.name}' takes .* products")


def test_a_combination_has_a_reader_s_time_and_memory(validator: Validator, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [pack_adapter(adapter) for adapter in ADAPTERS]
    monkeypatch.setattr(validator_module, "MAX_COMBINE_S", 0.0)
    monkeypatch.setattr(validator, "reader_limits", ReaderLimits(base_s=0.0, bytes_per_s=1e12))
    with pytest.raises(AdapterReadFailed, match="was not read within"):
        validator.combine(combination(), packed, SPEC)
    monkeypatch.setattr(validator, "reader_limits", ReaderLimits(base_memory_bytes=4096, memory_per_byte=0))
    with pytest.raises((AdapterTooLarge, AdapterReadFailed)):
        validator.combine(combination(), packed, SPEC)


def test_what_cannot_be_combined_is_named_by_the_reader_process(validator: Validator) -> None:
    """Text settings are compared where registrations are known (`common_text`); contents have none."""
    other = random_adapter(SPEC, 2, seed=3)
    with pytest.raises(CombinationError, match=r"ranks \[4, 2\] differ, and 'linear' needs equal ones"):
        validator.combine(combination(CombinationMethod("linear")), list(map(pack_adapter, (ADAPTERS[0], other))), SPEC)
