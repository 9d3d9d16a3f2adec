"""What is refused at the door names its field, value and limit."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from app.engine.errors import ContextOverflow, InvalidRequest
from app.engine.request import SamplingParams
from app.engine.request_validation import MIN_TEMPERATURE, validate_request, validate_sampling
from app.kernels.sampling import cpu as sampling
from app.kernels.sampling import reference
from tests.fakes import VOCAB, fake_request, fake_spec
from tests.seeds import rng


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", nan),
        ("temperature", inf),
        ("temperature", "hot"),
        pytest.param("temperature", 10**400, id="temperature-no-float"),
        ("temperature", 9e-31),
        ("temperature", 1e-45),
        ("temperature", 5e-324),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", nan),
        pytest.param("top_p", 10**400, id="top_p-no-float"),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * 257),
        ("presence_penalty", 2.1),
        ("presence_penalty", nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", inf),
        ("num_logprobs", -1),
        ("num_logprobs", 21),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        validate_sampling(replace(SamplingParams(), **{name: value}), fake_spec())
    assert caught.value.param == name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": 2**31 - 1, "min_p": 1.0, "seed": 2**64 - 1},
        {"temperature": 1e-30},
        {"num_logprobs": 0},
        {"num_logprobs": 20, "presence_penalty": -2.0, "frequency_penalty": 2, "repetition_penalty": 1.3},
        {"stop_token_ids": (0, VOCAB - 1), "max_tokens": 1},
    ],
)
def test_the_edges_of_every_range_are_accepted(values: dict[str, Any]) -> None:
    validate_sampling(SamplingParams(**values), fake_spec())


def test_the_least_temperature_draws_the_most_likely_token() -> None:
    """Below it the reciprocal would be infinite, and a draw uniform over the whole vocabulary."""
    row = rng().permutation(VOCAB).astype(np.float32)
    for seed in range(20):
        settings = np.float32(MIN_TEMPERATURE), np.int32(0), np.float32(1), np.float32(0), np.uint64(seed), np.int64(3)
        assert sampling.draw(row, *settings) == row.argmax()
        assert reference.draw(row, MIN_TEMPERATURE, 0, 1.0, 0.0, seed, 3) == row.argmax()


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40, 1.5, "x", None])
@pytest.mark.parametrize("name", ["token_ids", "resume_token_ids", "prediction_ids"])
def test_token_ids_outside_the_vocabulary_are_named(name: str, bad: Any) -> None:
    request = replace(fake_request("r", [1, 2]), **{name: (1, bad)})
    with pytest.raises(InvalidRequest) as caught:
        validate_request(request, fake_spec(), 100, 100)
    assert caught.value.param == name
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("ids", [(True, False), (np.True_,), ((1, 2), (3, 4)), ((1,), (2, 3)), (np.uint64(2**63),)])
def test_token_ids_that_are_no_integers_at_all_are_named(ids: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match="token_ids contains") as caught:
        validate_request(fake_request("r", ids), fake_spec(), 100, 100)
    assert repr(ids[0]) in str(caught.value)


@pytest.mark.parametrize("kinds", [(np.uint16,), (np.int64,), (np.uint64,), (np.uint64, np.int64), (np.uint8, int)])
def test_token_ids_may_be_numpys(kinds: tuple[Any, ...]) -> None:
    validate_request(fake_request("r", [kind(3) for kind in kinds]), fake_spec(), 100, 100)


def test_lengths_and_weight() -> None:
    spec = fake_spec()
    validate_request(fake_request("r", [1] * 84), spec, 100, 99)
    cases = [
        (fake_request("r", []), InvalidRequest, "token_ids"),
        (fake_request("r", [1] * 85), ContextOverflow, "max_tokens"),
        (fake_request("r", [1] * 100), ContextOverflow, "token_ids"),
        (fake_request("r", [1], weight=0.0), InvalidRequest, "weight"),
        (fake_request("r", [1], weight=inf), InvalidRequest, "weight"),
        (fake_request("r", [1], weight=nan), InvalidRequest, "weight"),
        (fake_request("r", [1], weight=10**400), InvalidRequest, "weight"),
        (fake_request("r", [1], resume_token_ids=[1] * 17), InvalidRequest, "resume_token_ids"),
    ]
    for request, kind, param in cases:
        with pytest.raises(kind) as caught:
            validate_request(request, spec, 100, 99)
        assert caught.value.param == param
    with pytest.raises(ContextOverflow, match=r"84 tokens.*16.*100.*KV memory holds 98"):
        validate_request(fake_request("r", [1] * 84), spec, 100, 98)
