"""Combined adapters give the logits of PEFT's `add_weighted_adapter`; what has no combination is refused by name."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft.utils.merge_utils
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining import combine as composing
from app.engine.adapters.combining.combination import (
    MAX_PARTS,
    METHODS,
    CombinationMethod,
    CombinationPart,
    display_source,
    make_combination,
    parse_combination,
)
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.packing import pack_adapter, unpack_adapter
from app.engine.errors import CombinationError, InvalidRequest
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.parity import (
    base_logits,
    our_logits,
    random_tokens,
    save_random_adapter,
    spec_of,
    tiny_model,
)
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec
from tests.pairwise import pairwise

pytestmark = PEFT_WARNINGS
TOLERANCE = 1e-5
WEIGHTS = {"sql": 0.7, "tone": -0.4, "law": 1.3}
#: "law" touches other modules, and its scale is negative.
EQUAL_RANKS: dict[str, dict[str, Any]] = {
    "sql": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 6},
    "tone": {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 4, "lora_alpha": 4, "use_rslora": True},
    "law": {"target_modules": ["down_proj", "gate_proj", "v_proj"], "r": 4, "lora_alpha": -3},
}
MIXED_RANKS = {
    name: options | {"r": rank} for (name, options), rank in zip(EQUAL_RANKS.items(), (2, 8, 5), strict=True)
}
FUSED = {
    name: {"target_modules": ["qkv_proj", "down_proj"], "r": 4, "lora_alpha": alpha}
    for name, alpha in (("sql", 6), ("tone", 2), ("law", -3))
}


def saved(model: Any, folder: Path, options: dict[str, dict[str, Any]]) -> dict[str, Path]:
    for name, of_one in options.items():
        save_random_adapter(model, folder / name, LoraConfig(task_type="CAUSAL_LM", **of_one))
    return {name: folder / name for name in options}


def peft_mix(model: Any, folders: dict[str, Path], tokens: torch.Tensor, **method: Any) -> NDArray[np.float32]:
    names = list(folders)
    mixed = PeftModel.from_pretrained(copy.deepcopy(model), folders[names[0]], adapter_name=names[0])
    for name in names[1:]:
        mixed.load_adapter(folders[name], name)
    mixed.add_weighted_adapter(names, [WEIGHTS[name] for name in names], "mix", **method)
    mixed.set_adapter("mix")
    return base_logits(mixed.eval(), tokens)


def mixed_by_us(adapters: dict[str, LoraAdapter], spec: Any, method: CombinationMethod) -> LoraAdapter:
    parts = [
        CombinationPart(AdapterRef(name, one.card.digest, "acme"), WEIGHTS[name]) for name, one in adapters.items()
    ]
    combination = make_combination(parts, method)
    by_name = [unpack_adapter(*pack_adapter(adapters[part.ref.name])) for part in combination.parts]
    return combine(combination, by_name, spec)


def kept_columns(tensor: Any, density: float, *_: Any, **__: Any) -> Any:
    """What both sides agree to drop, whatever order the rows of a fused module have: values differ in a last bit."""
    mask = (np.arange(tensor.shape[-1]) * 7 % 10 < density * 10).astype(np.float32)
    return tensor * (torch.from_numpy(mask) if isinstance(tensor, torch.Tensor) else mask) / density


@pytest.fixture
def agreed_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dropped at random is the same on both sides."""
    monkeypatch.setattr(peft.utils.merge_utils, "random_pruning", kept_columns)
    monkeypatch.setattr(composing, "prune_random", kept_columns)


@pytest.mark.usefixtures("agreed_pruning")
@pairwise({"method": METHODS, "layout": ["equal ranks", "mixed ranks", "fused"]}, strength=1)
def test_combinations_are_those_of_peft(method: Any, layout: str, tmp_path: Path) -> None:
    options = {"equal ranks": EQUAL_RANKS, "mixed ranks": MIXED_RANKS, "fused": FUSED}[layout]
    torch.manual_seed(7)  # which of two values is larger must not hang on a last bit
    model = tiny_model("phi3" if layout == "fused" else "llama", tie_word_embeddings=False)
    spec, tokens = spec_of(model), random_tokens(model)
    folders = saved(model, tmp_path, options)
    adapters = {name: read_adapter(folder, spec) for name, folder in folders.items()}
    asked: dict[str, Any] = {} if method in ("cat", "linear", "svd") else {"density": 0.6}
    chosen = CombinationMethod(method, **asked)
    if layout == "mixed ranks" and method != "cat" and not method.endswith("svd"):
        with pytest.raises(CombinationError, match=r"ranks \[.*\] differ, and .* needs equal ones; use 'cat'"):
            mixed_by_us(adapters, spec, chosen)
        return
    expected = peft_mix(model, folders, tokens, combination_type=method, **asked)
    derived = mixed_by_us(adapters, spec, chosen)
    np.testing.assert_allclose(our_logits(model, derived, tokens), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(expected - base_logits(model, tokens)).max() > 100 * TOLERANCE, "the adapters do nothing"


@pytest.mark.parametrize("method", ["cat", "linear", "svd"])
@pytest.mark.parametrize("num_adapters", [1, 2])
def test_an_rslora_in_front_makes_the_sum_no_larger(method: Any, num_adapters: int, tmp_path: Path) -> None:
    """PEFT gives its sum the first adapter's `use_rslora`, and so the root of its rank as a factor. That is no sum."""
    model = tiny_model("llama", tie_word_embeddings=False)
    spec, tokens = spec_of(model), random_tokens(model)
    options = dict(list({"tone": EQUAL_RANKS["tone"], **EQUAL_RANKS}.items())[:num_adapters])
    folders = saved(model, tmp_path, options)
    adapters = {name: read_adapter(folder, spec) for name, folder in folders.items()}
    # A rank for the whole sum: which of two almost equal directions is cut would hang on a last bit.
    whole = {"svd_rank": sum(option["r"] for option in options.values())} if method == "svd" else {}
    derived = our_logits(model, mixed_by_us(adapters, spec, CombinationMethod(method, **whole)), tokens)
    for name in folders:
        file = tmp_path / name / "adapter_config.json"
        config = json.loads(file.read_text())
        scale = config["lora_alpha"] / math.sqrt(config["r"]) if config["use_rslora"] else None
        if scale is not None:  # the same adapter, said otherwise
            file.write_text(json.dumps(config | {"use_rslora": False, "lora_alpha": scale * config["r"]}))
    expected = peft_mix(model, folders, tokens, combination_type=method, **whole)
    np.testing.assert_allclose(derived, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("method", ["svd", "ties_svd", "magnitude_prune_svd"])
def test_without_a_rank_an_svd_has_the_largest_of_any_module(method: Any, tmp_path: Path) -> None:
    """PEFT's is the largest of the configurations, which may be no module's and is then no part of an identity."""
    torch.manual_seed(7)
    model = tiny_model("llama", tie_word_embeddings=False)
    spec, tokens = spec_of(model), random_tokens(model)
    options = {"sql": {"target_modules": ["q_proj"], "r": 12, "rank_pattern": {"q_proj": 3}}}
    options["tone"] = {"target_modules": ["q_proj", "v_proj"], "r": 5}
    folders = saved(model, tmp_path, options)
    adapters = {name: read_adapter(folder, spec) for name, folder in folders.items()}
    asked = {} if method == "svd" else {"density": 0.6}
    found = {}
    for rank, peft_rank in ((None, 5), (12, None)):
        derived = mixed_by_us(adapters, spec, CombinationMethod(method, svd_rank=rank, **asked))
        found[rank] = our_logits(model, derived, tokens)
        expected = peft_mix(model, folders, tokens, combination_type=method, svd_rank=peft_rank, **asked)
        np.testing.assert_allclose(found[rank], expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(found[None] - found[12]).max() > 100 * TOLERANCE


@pytest.mark.usefixtures("agreed_pruning")
@pytest.mark.parametrize("method", [method for method in METHODS if method != "cat"])
def test_an_alpha_of_zero_adds_nothing_and_is_refused_where_it_would_vote(method: Any, tmp_path: Path) -> None:
    """In PEFT the B of such an adapter elects signs and is counted in means, though no product ever uses it."""
    torch.manual_seed(7)
    model = tiny_model("llama", tie_word_embeddings=False)
    spec, tokens = spec_of(model), random_tokens(model)
    folders = saved(model, tmp_path, EQUAL_RANKS | {"law": EQUAL_RANKS["law"] | {"lora_alpha": 0}})
    adapters = {name: read_adapter(folder, spec) for name, folder in folders.items()}
    asked: dict[str, Any] = {} if method in ("linear", "svd") else {"density": 0.6}
    chosen = CombinationMethod(method, **asked)
    if method in ("ties", "dare_ties"):
        said = rf"adapter 'law' has lora_alpha 0 for \w+ of layer 0: .* a vote with '{method}'; .* '{method}_svd'"
        with pytest.raises(CombinationError, match=said):
            mixed_by_us(adapters, spec, chosen)
        return
    expected = peft_mix(model, folders, tokens, combination_type=method, **asked)
    derived = mixed_by_us(adapters, spec, chosen)
    np.testing.assert_allclose(our_logits(model, derived, tokens), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_weighted_sum_is_side_by_side_and_exact() -> None:
    spec = tiny_spec()
    first, second = random_adapter(spec, 3, seed=1), random_adapter(spec, 8, ["q_proj"], seed=2)
    parts = [
        CombinationPart(AdapterRef(name, one.card.digest, "t"), w)
        for name, one, w in (("a", first, 0.5), ("b", second, 3))
    ]
    combination = make_combination(parts)
    ordered = sorted((first, second), key=lambda one: one.card.digest)
    derived = combine(combination, ordered, spec)
    key, alone = LoraKey(0, "q_proj"), LoraKey(1, "down_proj")
    weights = {first.card.digest: np.float32(0.5), second.card.digest: np.float32(3)}
    np.testing.assert_array_equal(derived.weights[key].a, np.concatenate([one.weights[key].a for one in ordered]))
    np.testing.assert_array_equal(
        derived.weights[key].b, np.concatenate([weights[one.card.digest] * one.weights[key].b for one in ordered])
    )
    assert derived.weights[alone].rank == 3
    assert derived.card.max_rank == 11
    assert derived.card.digest == combination.digest


def test_values_that_bfloat16_holds_stay_in_two_bytes() -> None:
    spec = tiny_spec()
    adapters = [random_adapter(spec, 8, seed=seed, dtype="BF16", saved_in="BF16") for seed in (1, 2)]
    adapters.sort(key=lambda one: one.card.digest)
    for weight, dtype in ((0.5, BFLOAT16), (0.7, np.float32)):
        parts = [CombinationPart(AdapterRef(str(n), one.card.digest, "t"), weight) for n, one in enumerate(adapters)]
        derived = combine(make_combination(parts), adapters, spec)
        assert {pair.b.dtype for pair in derived.weights.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    ("options", "method", "said"),
    [
        ({"use_dora": True}, "cat", "adapter 'sql' has DoRA, which 'cat' cannot combine"),
        ({"bias": "lora_only"}, "cat", None),  # llama has no biases to train
        ({"modules_to_save": ["norm"]}, "cat", "adapter 'sql' has trained norms"),
        ({"trainable_token_indices": [5]}, "cat", "adapter 'sql' has trained token rows"),
        ({"lora_bias": True}, "linear", "adapter 'sql' has lora_bias, which 'linear' cannot combine"),
    ],
)
def test_what_has_no_sum_is_refused_by_name(
    options: dict[str, Any], method: Any, said: str | None, tmp_path: Path
) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    spec = spec_of(model)
    plain = {"target_modules": ["q_proj", "v_proj"], "r": 4}
    folders = saved(model, tmp_path, {"sql": plain | options, "tone": plain})
    adapters = {name: read_adapter(folder, spec, supported_features=FEATURES) for name, folder in folders.items()}
    if said is None:
        assert mixed_by_us(adapters, spec, CombinationMethod(method)).card.max_rank == 8
        return
    with pytest.raises(CombinationError, match=said):
        mixed_by_us(adapters, spec, CombinationMethod(method))


def test_lora_bias_is_summed_with_its_delta(tmp_path: Path) -> None:
    """As the sum of what the adapters add, one by one."""
    model = tiny_model("llama", num_hidden_layers=1)
    spec = spec_of(model)
    options = {"target_modules": ["q_proj"], "r": 4, "lora_bias": True}
    folders = saved(model, tmp_path, {"sql": options, "tone": options | {"r": 2}})
    adapters = {name: read_adapter(folder, spec, supported_features=FEATURES) for name, folder in folders.items()}
    derived, key = mixed_by_us(adapters, spec, CombinationMethod()), LoraKey(0, "q_proj")
    expected = sum(np.float32(WEIGHTS[name]) * one.delta_biases[key] for name, one in adapters.items())
    np.testing.assert_allclose(derived.delta_biases[key], expected, atol=1e-7)


def test_a_sum_that_is_the_base_is_none() -> None:
    spec = tiny_spec()
    first, second = (random_adapter(spec, 4, seed=seed) for seed in (1, 2))
    zeros = {key: LoraPair(pair.a, np.zeros_like(pair.b)) for key, pair in first.weights.items()}
    nothing = replace(first, weights=zeros)
    assert (first.is_zero, nothing.is_zero) == (False, True)
    with pytest.raises(CombinationError, match="change nothing"):
        mixed_by_us({"sql": nothing, "tone": nothing}, spec, CombinationMethod())
    with pytest.raises(CombinationError, match="change nothing"):
        mixed_by_us({"sql": first, "tone": second}, spec, CombinationMethod("magnitude_prune", density=0.0))
    assert not mixed_by_us({"sql": nothing, "tone": second}, spec, CombinationMethod()).is_zero
    refs = [CombinationPart(AdapterRef(name, name, "t"), 0.0) for name in ("sql", "tone")]
    with pytest.raises(InvalidRequest, match="all weights are 0"):
        make_combination(refs)


def test_identity_is_contents_weights_and_method() -> None:
    sql, tone = AdapterRef("sql", "aa", "t", 3, "hf://o/sql@1"), AdapterRef("tone", "bb", "t")
    first = make_combination([CombinationPart(sql, 0.7), CombinationPart(tone, 0.3)])
    assert (
        first.digest
        == make_combination(
            [CombinationPart(tone, 0.3), CombinationPart(replace(sql, name="other", uri="/x"), 0.7)]
        ).digest
    )
    others = [
        make_combination([CombinationPart(sql, 0.3), CombinationPart(tone, 0.7)]),
        make_combination([CombinationPart(sql, 0.7), CombinationPart(tone, 0.3)], CombinationMethod("linear")),
        make_combination([CombinationPart(sql, 0.7), CombinationPart(tone, 0.3)], CombinationMethod("svd", svd_rank=4)),
        make_combination([CombinationPart(sql, 0.7)]),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5
    ref = first.ref("acme")
    assert (ref.name, ref.tenant_id, ref.digest) == ("sql*0.7+tone*0.3", "acme", first.digest)
    assert parse_combination(ref.uri) == first
    assert display_source(ref.uri) == "cat(sql*0.7+tone*0.3)"
    assert make_combination([CombinationPart(sql, 1.0)]).ref("acme") == sql, "one as it is, is that one"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: make_combination([]), "0 adapters are named; from 1 to 16"),
        (lambda ref: make_combination([CombinationPart(ref, 1.0)] * (MAX_PARTS + 1)), "17 adapters are named"),
        (lambda ref: make_combination([CombinationPart(ref, 1.0)] * 2), "'sql' is named twice; add its weights"),
        (lambda ref: make_combination([CombinationPart(ref, float("nan"))]), "adapter 'sql' has weight nan"),
        (
            lambda ref: make_combination([CombinationPart(ref, 1.0)], CombinationMethod("ties_svd", density=0.5)),
            "'ties_svd' combines several",
        ),
        (lambda _: CombinationMethod("ties"), "method 'ties' needs a density"),
        (lambda _: CombinationMethod("cat", svd_rank=3), "method 'cat' has no use for svd_rank"),
    ],
)  # fmt: skip
def test_mistakes_are_named(make: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        make(AdapterRef("sql", "aa", "t"))


def test_what_is_dropped_at_random_is_the_same_everywhere() -> None:
    ones = np.ones((100, 100), np.float32)
    first = composing.prune_random(ones, 0.25, np.random.default_rng(3))
    np.testing.assert_array_equal(first, composing.prune_random(ones, 0.25, np.random.default_rng(3)))
    assert set(np.unique(first)) == {0.0, 4.0}
    assert 0.22 < (first > 0).mean() < 0.28
