"""`HttpService` without Ray or a socket: a fleet of one fake engine, and a registry in a temporary folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.config import LimitsConfig
from app.deployments.ingress.frontend import Frontend, Job
from app.deployments.ingress.management import Management
from app.deployments.registry.view import RegistryView
from app.engine.adapters.card import AdapterRef
from app.engine.request import Usage
from tests.deployments.fleet import Fleet
from tests.deployments.managed import ManagedStore


class Letters:
    """A vocabulary of 61 characters, one token each."""

    max_context = 128
    vocab_size = 61

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 61 for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['role']}:{message['content']}|" for message in messages))

    def decoder(self) -> Letters:
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


class Service:
    """`HttpService` over a fleet of one."""

    base_name = "base"

    def __init__(self, fleet: Fleet, managed: ManagedStore) -> None:
        self.fleet = fleet
        self.managed = managed
        self.management = Management(managed.client, managed, lambda: fleet.table)
        self.dispatcher = fleet.dispatcher(replica_wait_s=0.2)
        self.observed: list[tuple[str, int]] = []
        self.counted: list[tuple[Job | None, list[Usage | None]]] = []
        limits = LimitsConfig(max_body_bytes=20_000, max_sequences=4, request_timeout_s=120)
        self.frontend = Frontend(Letters(), "base", self.resolve, self.dispatcher.stream, limits)

    def resolve(self, name: str, sticky_key: str) -> AdapterRef | None:
        return self.registry.resolve(name, sticky_key)

    @property
    def registry(self) -> RegistryView:
        return self.managed.view

    def is_ready(self) -> bool:
        return bool(self.dispatcher.links.usable_loads())

    def observe(self, route: str, status: int, job: Job | None) -> None:
        self.observed.append((route, status))
        self.counted.append((job, [] if job is None else job.usages))
