"""What the tiers of the store tell, as a test reads it."""

from __future__ import annotations

from app.deployments.registry.models import State
from app.deployments.registry.tier_events import TierEvents


class RecordedEvents(TierEvents):
    """Events that are remembered, all of them."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, State]] = []
        self.moves: list[tuple[str, str]] = []

    def on_progress(self, source: str, state: State) -> None:
        self.reads.append((source, state))

    def on_move(self, event: str, digest: str) -> None:
        self.moves.append((event, digest))
