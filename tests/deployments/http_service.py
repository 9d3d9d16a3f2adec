"""The ingress's service without Ray or a socket: a fleet of one fake engine, and a registry in a temporary folder."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import tokenizers

from app.config import AppConfig, PlacementConfig, PriceConfig
from app.deployments.ingress.accounting import PricingContext, RequestAccounting
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.service import IngressService, Parts
from app.deployments.placement.service import PlacementService, TrafficShareChanges
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.long_poll_client import Watch
from app.deployments.rpc.metrics_agents import MetricsAgents
from app.deployments.rpc.transport import Frame
from app.deployments.tenancy.usage.prices import Prices
from app.deployments.tenancy.usage.traffic_history import TrafficHistory
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.models.chat.tool_call_formats import ToolCallFormat, tool_format
from app.engine.models.tokenizers.tokenizer import Tokenizer
from app.engine.request import GenerateRequest, Usage
from tests.deployments.fleet import Fleet, Unbatched
from tests.deployments.managed import Here, ManagedStore, wanted
from tests.engine.structured_output.tokens import tiny_tokenizer
from tests.fakes import fake_adapter, fake_spec

#: A dollar per million prompt tokens, ten cents for cached ones, four dollars for generated ones.
_PRICES = {"base": PriceConfig(input=1, cached_input=0.1, output=4)}
RATES = PricingContext(Prices(_PRICES, "base"), "base")


class Letters:
    """A vocabulary of 61 characters, one token each. An adapter's template is written before the messages."""

    max_model_len = 128
    vocab_size = 61
    grammar_tokens = ""
    spec = fake_spec()

    def of_adapter(self, text: str) -> Letters:  # noqa: ARG002
        return self

    def encode_answer(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 61 for character in text]

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self.encode(f"{first}|{second}")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
        extra: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,  # noqa: ARG002
        continue_final_message: bool = False,  # noqa: ARG002
        tenant_id: str = "",  # noqa: ARG002
    ) -> list[int]:
        written = (json.dumps(extra) if extra else "") + (AdapterTokenizer.from_json(text).chat_template or "")
        return self.encode(written + "".join(f"{message['role']}:{message['content']}|" for message in messages))

    def tool_format(self, text: str = "") -> ToolCallFormat:
        return tool_format(text)

    def specials(self, form: ToolCallFormat) -> Mapping[str, int]:  # noqa: ARG002
        return {}

    def enforceable(self, schema: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:  # noqa: ARG002
        return schema, ()

    def specials_in(self, texts: Sequence[str]) -> Mapping[int, str]:  # noqa: ARG002
        return {}

    def check_grammar(self, wanted: RequestedGrammar) -> None:
        """These letters write no JSON; `WritingModel` does."""
        raise NotImplementedError(wanted.place)

    def decoder(self, shown: frozenset[int] = frozenset(), *, continues: bool = False) -> Letters:  # noqa: ARG002
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self.token_text(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return chr(65 + token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def text_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id)


class FleetReplicas:
    """`Replicas` over a fleet; adapters are dropped by the managed store, which takes a note of it."""

    def __init__(self, fleet: Fleet, managed: ManagedStore) -> None:
        self._fleet = fleet
        self._managed = managed

    def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        return self._fleet.frames(replica_id, link_id)

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        return await self._fleet.submit(replica_id, link_id, requests)

    async def wake(self) -> None:
        await self._fleet.wake()

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        await self._fleet.abort(replica_id, request_ids)

    async def unload_adapter(self, replica_id: str, digest: str) -> int:
        return await self._managed.unload_adapter(replica_id, digest)

    async def drain(self, replica_id: str) -> bool:
        return await self._fleet.drain(replica_id)

    async def stats(self, replica_id: str) -> dict[str, Any]:
        return {"replica_id": replica_id, "num_running": self._fleet.replicas[replica_id].report().num_running}


def _watch_nothing(store: str) -> Watch[TrafficShareChanges]:
    raise AssertionError(f"no replica reports the store {store}")


class RecordedMetrics:
    """What was counted, in order."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def request(self, route: str, status: int, **what: Any) -> None:
        self.requests.append({"route": route, "status": status} | what)


class Service(IngressService):
    """The service over a fleet of one; it takes a note of each request that has ended.

    `first`: the service of the first of two base models, `base_names`.
    """

    def __init__(
        self,
        fleet: Fleet,
        managed: ManagedStore,
        text: TokenizerService | None = None,
        *,
        base_names: Sequence[str] = ("base",),
        first: Service | None = None,
    ) -> None:
        name = base_names[0 if first is None else 1]
        self.fleet = fleet
        self.managed = managed
        self.metrics = RecordedMetrics()
        self.placement = PlacementService(PlacementConfig(), _watch_nothing, lambda: None, time.monotonic)
        self.nodes: list[dict[str, Any]] = []  # Ray's table of nodes
        self.observed: list[tuple[str, int]] = []
        self.counted: list[tuple[GenerationTask | None, list[Usage | None]]] = []
        limits = {"max_body_bytes": 20_000, "max_sequences": 4, "request_timeout_s": 120, "replica_timeout_s": 0.2}
        parts = Parts(
            tokenizer=text or Letters(),
            registry=managed.view,
            accounting=RequestAccounting(
                managed.tenants, managed.tenants_client, RATES, uuid.uuid4().hex, managed.clock
            )
            if first is None
            else first.accounting.for_base(PricingContext(Prices(_PRICES, name), name)),
            store=managed.client,
            storage=managed.storage if first is None else first.storage,
            traffic=actor_proxy(TrafficHistory, Here(managed.traffic)),
            ingress_id=uuid.uuid4().hex,
            placer=fleet,
            policy=fleet.policy,
            loads=ReplicaLoadTracker(asyncio.get_running_loop().time),
            replicas=FleetReplicas(fleet, managed),
            make_batcher=Unbatched,
            metrics=self.metrics,
            metrics_agents=MetricsAgents(lambda: self.nodes),
            clock=time.time,
            steady_clock=asyncio.get_running_loop().time,
            read_scaling=self.placement.scaling_decisions,
        )
        fleet.usage_recorder = (
            parts.accounting.usage_recorder
        )  # so that whoever asks after a request finds it in the ledger
        settings = {
            "model": {"name": name},
            "limits": limits,
            "adapters": {"resolvers": ["{name}"]},
            "semantic_router": {"embedder": "base", "threshold": 0.6},
        }
        super().__init__(AppConfig.model_validate(settings), parts, base_names)

    @property
    def num_streams(self) -> int:
        return self._connections.num_streams

    def observe(self, route: str, status: int, task: GenerationTask | None) -> None:
        super().observe(route, status, task)
        self.observed.append((route, status))
        self.counted.append((task, [] if task is None else task.usages))


async def add_judge(service: Service, name: str = "judge", labels: int = 1) -> LoraAdapter:
    """Registers an adapter with a score head."""
    adapter = fake_adapter(name, 8, labels=labels)
    service.fleet.adapters[adapter.card.digest] = adapter
    service.managed.store.contents[name] = adapter.card.digest
    service.managed.store.score_heads.add(adapter.card.digest)
    await service.managed.client.load_and_wait(wanted(name, name))
    return adapter


#: Written by a template that knows tools, in Hermes' form; short, because here a character is a token.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|"
    "{% endfor %}"
)
#: The fake model that writes JSON: 120 tokens, printable ASCII among them.
WRITING_SPEC = dataclasses.replace(fake_spec(max_positions=1024), vocab_size=120, eos_token_ids=(2,))


def writing_text(template: str = TEMPLATE) -> TokenizerService:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    return TokenizerService(Tokenizer(backend, {"eos_token": "</s>"}, {"default": template}), WRITING_SPEC, 1024)
