"""`model: "auto"`: order and threshold, who may be chosen, and what the client sees of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.config import SemanticRouterConfig
from app.deployments.ingress.accounting import RequestAccounting, ReservedQuota
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import RoutingFields
from app.deployments.ingress.semantic_router.candidates import Candidates, _OwnerCandidates
from app.deployments.ingress.semantic_router.decision import Decision, ScoredAdapter
from app.deployments.ingress.semantic_router.embedders import BaseEmbedder, EncoderEmbedder
from app.deployments.ingress.semantic_router.router import SemanticRouter
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import AliasEntry, CatalogEntry
from app.deployments.tenancy.models import PUBLIC
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import CombinationPart, make_combination
from app.engine.errors import NotReady
from tests.deployments.http_service import Service, add_judge
from tests.deployments.ingress.http.middleware.test_auth import Org, org
from tests.deployments.ingress.http.test_limits import engines, used
from tests.deployments.managed import wanted
from tests.engine import encoders
from tests.fakes import fake_adapter

__all__ = ["org"]

ADA = Principal("ada", "key", replace(PUBLIC, shared=frozenset({("zed", "shared")})))
WORDS = ("sql", "law", "tone", "shared")


class Bags:
    """Texts as counts of a few words, beside a little of everything else."""

    name = "a bag of words"
    has_price = True

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> NDArray[np.float32]:  # noqa: ARG002
        texts = [bytes(of_text).decode() for of_text in token_ids]
        self.asked.append(texts)
        await self.gate.wait()
        counts = np.array([[text.count(word) for word in WORDS] + [0.2] for text in texts], np.float32)
        unit: NDArray[np.float32] = counts / np.linalg.norm(counts, axis=1, keepdims=True)
        return unit

    async def embed_texts(self, *texts: str) -> NDArray[np.float32]:
        return await self.embed(await self.tokenize(texts), None)


def entry(name: str, description: str, tenant_id: str = "ada") -> CatalogEntry:
    digest = hashlib.sha256(f"{tenant_id}/{name}".encode()).hexdigest()
    return CatalogEntry(AdapterRef(name, digest, tenant_id), 8, 64, 0.0, "ada", description=description)


class Unlimited(RequestAccounting):
    """Charges nobody."""

    def __init__(self) -> None:
        self.charged: list[tuple[str, int]] = []

    def owner(self, tenant_id: str) -> Principal:
        return Principal(tenant_id, "test", PUBLIC)

    async def charge_tokens(self, caller: Principal, num_tokens: int, *, has_price: bool) -> None:  # noqa: ARG002
        self.charged.append((caller.tenant_id, num_tokens))

    async def admit_routing(self, caller: Principal, num_tokens: int, *, has_price: bool) -> ReservedQuota:  # noqa: ARG002
        self.charged.append((caller.tenant_id, num_tokens))
        return ReservedQuota(Reservation({}, is_settled=True), Reservation({}, is_settled=True))

    def finish_routing(self, quota: ReservedQuota) -> None: ...

    def release(self, quota: ReservedQuota, *, is_repeated: bool) -> None: ...

    def count_routed_request(self, caller: Principal) -> None: ...


def router_of(*entries: Any, **config: Any) -> tuple[SemanticRouter, RegistryView, Bags]:
    view, bags = RegistryView(entries), Bags()
    return SemanticRouter(SemanticRouterConfig(**config), view, bags, 0.05, Unlimited()), view, bags


async def names(router: SemanticRouter, text: str, caller: Principal = ADA, **wishes: Any) -> list[str]:
    return [one.name for one in (await router.choose(text, caller, RoutingFields(**wishes))).chosen]


async def test_order_and_threshold() -> None:
    router, _, _ = router_of(entry("a", "sql law law"), entry("b", "sql"), entry("c", "tone"), top_k=3, threshold=0.4)
    decision = await router.choose("some sql", ADA)
    assert [one.name for one in decision.chosen] == ["b", "a"]
    scores = [one.score for one in decision.chosen]
    assert scores[0] > 0.9 > scores[1] > 0.4
    assert decision.num_candidates == 3
    assert decision.header == f"b={scores[0]:.4f},a={scores[1]:.4f}"
    assert sum(one.weight for one in decision.adapters) == pytest.approx(1)
    assert await names(router, "some sql", top_k=1) == ["b"]
    assert await names(router, "some sql", threshold=0.9) == ["b"]
    assert await names(router, "nothing of all this", threshold=0.99) == []


async def test_only_what_the_caller_may_use_is_chosen() -> None:
    router, _, _ = router_of(
        entry("own", "sql"), entry("hidden", "sql", "zed"), entry("shared", "sql", "zed"),
        entry("public", "sql", "default"), entry("own", "sql", "default"), top_k=9, threshold=0.3,
    )  # fmt: skip
    assert sorted(await names(router, "sql")) == ["own", "public", "shared"]
    listed = ADA._replace(tenant=replace(ADA.tenant, model_mode="allow_list", model_ids=frozenset({"base", "public"})))
    assert await names(router, "sql", listed) == ["public"]
    assert await names(router, "sql", Principal("stranger", "key", PUBLIC)) != ["hidden"]


@pytest.mark.parametrize(
    "own",
    [entry("one", "tone"), entry("one", ""), AliasEntry("one", (), 1, 0.0, tenant_id="ada")],
    ids=["described", "silent", "alias"],
)
async def test_a_name_is_chosen_for_what_the_caller_gets_under_it(own: Any) -> None:
    """Its own "one" stands before everybody's: what that says of itself chooses nothing."""
    router, _, _ = router_of(own, entry("one", "sql", "default"), entry("two", "sql law law", "default"), threshold=0.4)
    assert await names(router, "sql", top_k=2) == ["two"]
    assert await names(router, "sql", Principal("stranger", "key", PUBLIC), top_k=2) == ["one", "two"]


async def test_those_that_the_caller_does_not_get_under_their_names_are_not_counted() -> None:
    """Own names stand before those that others share, and these before everybody's."""
    router, view, _ = router_of(
        entry("one", "sql"), AliasEntry("two", (), 1, 0.0, tenant_id="ada"), entry("shared", ""),
        entry("shared", "sql", "zed"), entry("three", "sql", "zed"),
        *(entry(name, "sql", "default") for name in ("one", "two", "three", "shared", "four")),
    )  # fmt: skip
    assert (await router.choose("sql", ADA)).num_candidates == 3  # its own "one"; everybody's "three" and "four"
    view.apply([(("ada", "shared"), None)])
    assert (await router.choose("sql", ADA)).num_candidates == 4  # and the one that zed shares
    for mode, ids, number in (
        ("allow_list", ("ada:one", "zed:shared", "ada:two"), 2),
        ("deny_list", ("one", "four"), 2),
    ):
        tenant = replace(ADA.tenant, model_mode=mode, model_ids=frozenset(ids))
        assert (await router.choose("sql", ADA._replace(tenant=tenant))).num_candidates == number
    assert (await router.choose("sql", Principal("stranger", "key", PUBLIC))).num_candidates == 5
    view.apply([(("default", "three"), None), (("default", "four"), None), (("ada", "one"), None)])
    view.apply([(("ada", "one"), entry("one", "")), (("zed", "shared"), None), (("default", "shared"), None)])
    await router.choose("sql", ADA)
    charged = router._accounting.charged  # type: ignore[attr-defined]
    assert charged[-1] == ("ada", 0), "nothing that it gets under a name has a description"


async def test_what_the_caller_may_not_use_is_neither_counted_nor_waited_for() -> None:
    router, _, bags = router_of(
        entry("own", "sql"), entry("hidden", "sql", "zed"), entry("shared", "sql", "zed"),
        entry("open", "sql", "default"),
    )  # fmt: skip
    decision = await router.choose("sql", ADA)
    assert decision.num_candidates == 3
    assert not {"hidden", "hidden: sql"} & {text for texts in bags.asked for text in texts}
    for mode, number in (("allow_list", 1), ("deny_list", 2)):
        tenant = replace(ADA.tenant, model_mode=mode, model_ids=frozenset({"base", "zed:shared", "zed:hidden"}))
        assert (await router.choose("sql", ADA._replace(tenant=tenant))).num_candidates == number


async def test_what_is_everybodys_is_embedded_once_for_all_tenants() -> None:
    router, _, bags = router_of(entry("open", "sql", "default"))
    bags.gate.clear()
    asking = [
        asyncio.create_task(router.choose("sql", Principal(each, "key", PUBLIC))) for each in ("ada", "bob", "cy")
    ]
    await asyncio.sleep(0)
    bags.gate.set()
    await asyncio.gather(*asking)
    assert sum(asked == ["open", "sql", "open: sql"] for asked in bags.asked) == 1
    await router.close()


@pytest.mark.parametrize("scores", [(0.1, -0.1), (0.0, 0.0), (-0.2, -0.4), (0.9, 0.6)])
def test_shares_of_scores_that_a_low_threshold_lets_in(scores: tuple[float, ...]) -> None:
    chosen = tuple(ScoredAdapter(f"a{index}", "ada", score) for index, score in enumerate(scores))
    weights = [one.weight for one in Decision(chosen, 2, "e", -1.0, 2).adapters]
    assert sum(weights) == pytest.approx(1)
    assert weights[0] >= weights[1] >= 0


async def test_changes_of_the_registry_are_followed() -> None:
    router, view, bags = router_of(entry("a", "sql"), entry("b", ""), AliasEntry("c", (), 1, 0.0, tenant_id="ada"))
    assert await names(router, "sql") == ["a"]
    assert bags.asked == [["a", "sql", "a: sql"], ["sql"]], (
        "an alias and an adapter without a description are no candidates"
    )
    assert await names(router, "sql") == ["a"]
    assert bags.asked[2:] == [["sql"]], "nothing is embedded twice"
    view.apply([(("ada", "b"), entry("b", "tone")), (("ada", "a"), entry("a", "law"))])
    assert await names(router, "sql") == []
    assert await names(router, "tone") == ["b"]
    view.apply([(("ada", "b"), None)])
    assert await names(router, "tone") == []
    assert await names(router, "law") == ["a"]


async def test_without_candidates_nothing_is_embedded() -> None:
    router, _, bags = router_of(entry("b", ""))
    assert await names(router, "sql") == []
    assert bags.asked == []


async def test_new_descriptions_are_waited_for_and_not_passed_over() -> None:
    router, _, bags = router_of(entry("a", "sql"))
    bags.gate.clear()
    with pytest.raises(NotReady, match="descriptions of adapters are being embedded"):
        await router.choose("sql", ADA)
    bags.gate.set()
    assert await names(router, "sql") == ["a"]
    assert sum(asked == ["a", "sql", "a: sql"] for asked in bags.asked) == 1, "work goes on without whoever began it"
    await router.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), st.floats(-0.5, 0.9), st.integers(0, 2**32 - 1))
def test_the_nearest_are_those_of_a_whole_sort(count: int, top_k: int, threshold: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    allowed = {f"n{index}" for index in range(count) if rng.random() < 0.3}
    candidates = Candidates()
    for index in range(count):
        candidates.note(("ada", f"n{index}"), entry(f"n{index}", "something"))

    async def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        """Of a name, its description and both together, here the same vector."""
        assert [text for text in texts[1::3] if text != "something"] == []
        return np.repeat(vectors[[int(text[1:]) for text in texts[::3]]], 3, axis=0)

    asyncio.run(candidates.embed_pending("ada", None, embed))
    gone = {f"n{index}" for index in range(count) if rng.random() < 0.2}
    for name in gone:
        candidates.note(("ada", name), None)
    query = vectors[0] if count else np.ones(8, np.float32)
    found = candidates.nearest(query, {"ada": None}, lambda _, name: name in allowed, threshold, top_k)
    scores = {f"n{index}": float(vectors[index] @ query) for index in range(count)}
    expected = sorted((name for name in allowed - gone if scores[name] >= threshold), key=lambda name: -scores[name])[
        :top_k
    ]
    assert [one.name for one in found] == expected or [one.score for one in found] == pytest.approx(
        [scores[name] for name in expected], abs=1e-6
    )


async def test_example_prompts_are_compared_one_by_one() -> None:
    """The score is the mean of the two highest cosines of the whole description and its sentences."""
    router, _, _ = router_of(
        entry("many", "law law law law. tone! sql? tone of law"), entry("one", "sql law law"), top_k=2, threshold=0.0
    )
    for text in ("sql", "tone", "law sql", "nothing"):
        found = {one.name: one.score for one in (await router.choose(text, ADA)).chosen}
        vector = (await Bags().embed_texts(text))[0]
        for name, description in (("many", "law law law law. tone! sql? tone of law"), ("one", "sql law law")):
            whole = (await Bags().embed_texts(name, description, f"{name}: {description}")).mean(axis=0)
            cosines = [float(whole @ vector) / float(np.linalg.norm(whole))]
            if name == "many":
                parts = await Bags().embed_texts("law law law law.", "tone!", "sql?", "tone of law")
                cosines = sorted([*cosines, *(parts @ vector).tolist()])[-2:]
            assert found[name] == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)
    shared = Principal("ada", "key", replace(PUBLIC, model_mode="allow_list", model_ids=frozenset({"ada:many"})))
    assert await names(router, "sql", shared) == ["many"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_scores_of_all_and_of_some_are_the_same(count: int, seed: int) -> None:
    """Also after candidates were removed or described anew."""
    rng = np.random.default_rng(seed)

    def unit(number: int) -> NDArray[np.float32]:
        vectors = rng.standard_normal((number, 6)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    owned = _OwnerCandidates()
    for index in rng.integers(0, max(1, count // 2), count):
        owned.put(f"n{index}", "text", unit(1)[0], unit(int(rng.integers(0, 5))))
        if rng.random() < 0.2:
            owned.remove(f"n{rng.integers(0, count)}")
        query = unit(1)[0]
        np.testing.assert_allclose(owned.scores(query, None), owned.scores(query, list(owned.names)), atol=1e-6)


@pytest.fixture
def described(service: Service) -> Service:
    service._router._embedder = Bags()
    return service


async def register(http: httpx.AsyncClient, name: str, description: str) -> None:
    body = {"name": name, "path": name, "description": description, "wait": True}
    answer = await http.post("/v1/loras", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["description"] == description


async def test_the_answer_says_what_was_chosen(described: Service, http: httpx.AsyncClient) -> None:
    await register(http, "two", "knows the law")
    messages = [{"role": "user", "content": "law?"}]
    answer = await http.post("/v1/chat/completions", json={"model": "auto", "messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    routing = answer.json()["routing"]
    assert [one["name"] for one in routing["adapters"]] == ["two"]
    assert (routing["embedder"], routing["threshold"], routing["top_k"]) == ("a bag of words", 0.6, 1)
    assert answer.headers["X-Polylora-Adapter"] == "two@1"
    assert answer.headers["X-Polylora-Route"].startswith("two=0.9")
    body = {"model": "auto", "prompt": "weather?", "max_tokens": 2}
    base = await http.post("/v1/completions", json=body)
    assert base.headers["X-Polylora-Route"] == "base"
    assert "X-Polylora-Adapter" not in base.headers
    assert base.json()["routing"]["adapters"] == []
    explained = await http.post("/v1/route", json={"messages": messages})
    assert {**explained.json()} == {"object": "route", **routing}
    assert described.observed[-1] == ("route", 200)


async def test_one_that_was_not_read_may_win_and_is_read_then(described: Service, http: httpx.AsyncClient) -> None:
    body = {"name": "two", "path": "two", "description": "knows the law", "lazy": True}
    assert (await http.post("/v1/loras", json=body)).json()["state"] == "REGISTERED"
    explained = await http.post("/v1/route", json={"prompt": "law?"})
    assert [one["name"] for one in explained.json()["adapters"]] == ["two"]
    assert "two" not in described.managed.store.loads, "to explain reads nothing"
    answer = await http.post("/v1/completions", json={"model": "auto", "prompt": "law?", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Polylora-Adapter"] == "two@1"
    assert (await http.get("/v1/loras/two")).json()["state"] == "LOADED"


async def test_one_that_scores_is_not_chosen(described: Service, http: httpx.AsyncClient) -> None:
    """It generates no text, so its answer would be an error."""
    await register(http, "two", "knows some law")
    await add_judge(described)
    assert (await http.patch("/v1/loras/judge", json={"description": "law law"})).status_code == 200
    explained = await http.post("/v1/route", json={"prompt": "law?", "routing": {"top_k": 2, "threshold": 0.1}})
    assert [one["name"] for one in explained.json()["adapters"]] == ["two"]
    assert explained.json()["num_candidates"] == 1
    answer = await http.post("/v1/completions", json={"model": "auto", "prompt": "law?", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Polylora-Adapter"] == "two@1"


@pytest.mark.parametrize("top_k", [1, 2])
async def test_one_that_turns_out_to_score_gives_way_to_the_next(
    described: Service, http: httpx.AsyncClient, top_k: int
) -> None:
    """What was registered only is read when it is chosen, and its head is seen then."""
    await register(http, "two", "knows some law")
    adapter = fake_adapter("judge", 8, labels=1)
    described.fleet.adapters[adapter.card.digest] = adapter
    described.managed.store.contents["judge"] = adapter.card.digest
    described.managed.store.score_heads.add(adapter.card.digest)
    body = {"name": "judge", "path": "judge", "description": "law law", "lazy": True}
    assert (await http.post("/v1/loras", json=body)).json()["state"] == "REGISTERED"
    routing = {"top_k": top_k, "threshold": 0.1}
    explained = await http.post("/v1/route", json={"prompt": "law?", "routing": routing})
    assert [one["name"] for one in explained.json()["adapters"]] == ["judge", "two"][:top_k]
    answer = await http.post(
        "/v1/completions", json={"model": "auto", "prompt": "law?", "max_tokens": 2, "routing": routing}
    )
    assert answer.status_code == 200, answer.text
    assert [one["name"] for one in answer.json()["routing"]["adapters"]] == ["two"]
    assert answer.headers["X-Polylora-Adapter"] == "two@1"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"text_1": "law", "text_2": "sql"}),
        ("/v1/rerank", {"query": "law", "documents": ["sql"]}),
        ("/v1/classify", {"input": "law"}),
    ],
)
async def test_scores_come_from_a_named_adapter(
    described: Service, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    await register(http, "two", "knows the law")
    answer = await http.post(path, json=body | {"model": "auto"})
    assert answer.status_code == 400, answer.text
    assert "name an adapter of task type SEQ_CLS" in answer.json()["error"]["message"]
    assert described._router._embedder.asked == [], "nothing was chosen"  # type: ignore[attr-defined]


async def test_several_are_combined_by_their_scores(described: Service, http: httpx.AsyncClient) -> None:
    await register(http, "two", "law")
    await http.patch("/v1/loras/sql", json={"description": "law tone"})
    decision = await described._router.choose("law", Principal("default", "t"), RoutingFields(top_k=2, threshold=0.5))
    assert [one.name for one in decision.chosen] == ["two", "sql"]
    weights = {one.name: one.weight for one in decision.adapters}
    parts = []
    for name, weight in weights.items():
        ref = described.registry.resolve(name, "", "default")
        assert ref is not None
        parts.append(CombinationPart(ref, weight))
    derived, made = make_combination(parts).ref("default"), fake_adapter("their sum", 8)
    described.fleet.adapters[derived.digest] = replace(made, card=replace(made.card, digest=derived.digest))
    body = {"model": "auto", "prompt": "law", "max_tokens": 2, "routing": {"top_k": 2, "threshold": 0.5}}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Polylora-Adapter"] == f"{derived.name}@1"


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/v1/completions", {"model": "auto", "prompt": ["a", "b"]}, "needs exactly one prompt, as text"),
        ("/v1/completions", {"model": "auto", "prompt": [1, 2]}, "needs exactly one prompt, as text"),
        (
            "/v1/completions",
            {"model": "auto", "prompt": "a", "lora_path": "sql"},
            "chooses the adapter; remove lora_path",
        ),
        ("/v1/completions", {"model": "sql", "prompt": "a", "routing": {}}, "is only for model 'auto'"),
        ("/v1/route", {}, "give either messages, a conversation, or prompt"),
        ("/v1/loras", {"name": "auto", "path": "x"}, "lets the service choose an adapter; choose another name"),
        ("/v1/loras", {"name": "x", "path": "x", "description": "x" * 1001}, "1001 characters but at most 1000"),
    ],
)
async def test_mistakes_are_named(http: httpx.AsyncClient, path: str, change: Any, said: str) -> None:
    answer = await http.post(path, json=change)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


async def test_the_base_embeds_where_it_is_configured(service: Service) -> None:
    """Over the service's own replicas; its vectors have length 1 and are the same in any batch."""
    embedder = service._router._embedder
    assert isinstance(embedder, BaseEmbedder)
    token_ids = await embedder.tokenize(["knows the law", "sql"])
    both = await embedder.embed(token_ids, None)
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal((await embedder.embed(token_ids[1:], Principal("ada", "k", PUBLIC)))[0], both[1])


async def test_an_adapter_that_says_nothing_new_keeps_its_description(service: Service) -> None:
    client = service.managed.client
    await client.load_and_wait(replace(wanted("two", "two"), description="law"))
    assert (await client.describe("two", tenant_id="default")).entry.description == "law"  # type: ignore[union-attr]
    await client.configure("two", tenant_id="default", who="ada", pinned=True)
    assert (await client.describe("two", tenant_id="default")).entry.description == "law"  # type: ignore[union-attr]


async def test_what_choosing_computes_is_in_the_ledger(service: Service, http: httpx.AsyncClient) -> None:
    assert (await http.patch("/v1/loras/sql", json={"description": "writes queries"})).status_code == 200
    explained = await http.post("/v1/route", json={"prompt": "which adapter is this for?"})
    assert explained.json()["num_candidates"] == 1
    assert explained.json()["embedder"] == "base"
    counted, computed = await used(service), await engines(service)
    assert counted.prompt_tokens == computed.prompt_tokens > len("which adapter is this for?")


async def embedded_tokens(org: Org, who: str) -> int:
    assert await org.service.accounting.usage_flusher.flush()
    query = f"start_time={int(org.service.accounting.clock()) - 60}&project_ids[]={org.ids[who]}"
    answer = await org.ask("admin", "GET", f"/v1/organization/usage/embeddings?{query}")
    return sum(result["input_tokens"] for bucket in answer.json()["data"] for result in bucket["results"])


async def test_the_owner_of_a_description_pays_for_it(org: Org) -> None:
    assert (await org.ask("ada", "PATCH", "/v1/loras/secret", json={"description": "x" * 40})).status_code == 200
    assert (await org.ask("ada", "POST", "/v1/route", json={"prompt": "ab"})).status_code == 200
    num_tokens = len("secret") + 40 + len("secret: ") + 40 + len("ab")
    assert await embedded_tokens(org, "ada") == num_tokens
    assert (await org.ask("ada", "POST", "/v1/route", json={"prompt": "ab"})).status_code == 200
    assert await embedded_tokens(org, "ada") == num_tokens + len("ab"), "once"


@pytest.mark.parametrize("is_encoder", [False, True])
async def test_descriptions_wait_for_the_tokens_of_their_owner(org: Org, is_encoder: bool, tmp_path: Path) -> None:
    if is_encoder:  # which an ingress computes itself
        folder = encoders.save_encoder(encoders.tiny_encoder("bert"), tmp_path)
        org.service._router._embedder = EncoderEmbedder(str(folder))
    owner = org.service.accounting.tenants_service
    await owner.limit_rates(org.ids["ada"], "base", {"tokens_per_min": 40}, actor="test")
    await owner.share(org.ids["ada"], "secret", [org.ids["bob"]], actor="test")
    await org.ask("ada", "PATCH", "/v1/loras/secret", json={"description": "x" * 40})
    refused = await org.ask("ada", "POST", "/v1/route", json={"prompt": "ab"})
    assert refused.status_code == 429, refused.text
    assert "tokens per minute" in refused.json()["error"]["message"]
    assert await embedded_tokens(org, "ada") == 0
    answer = await org.ask("bob", "POST", "/v1/route", json={"prompt": "ab", "routing": {"threshold": -1}})
    assert answer.status_code == 200, "others do without"
    assert answer.json()["adapters"] == []
