"""Adapters from a Hugging Face hub: `hf://org/name@revision`.

Only PEFT's two files and their companions are downloaded, or the repository's one card. The result is a URI with the
commit: a branch may move, what was registered does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.store.sources.source_patterns import TENANT, matches_repository
from app.deployments.store.sources.source_resolution import Reserve, signature_name, unbounded
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.formats.arrow import CARD_SUFFIX
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.models.download.hub import download_hub_files, list_hub_files

#: (project id) -> its own token for the hub, if it has one.
OwnToken = Callable[[str], str | None]


def no_token(_: str) -> None:
    """Without projects."""


class HubFetcher:
    """A `Fetcher`. `endpoint` None: HF_ENDPOINT, else the public hub.

    `token` is the operator's: a project's adapters are read with it only from repositories that match `patterns` with
    `{tenant}` in it, or `resolved`, which are those of the operator's resolvers. `patterns` None: any repository.
    `own_token` gives a project's own token, which is used in place of the operator's.
    """

    def __init__(
        self,
        endpoint: str | None,
        token: str | None,
        *,
        max_bytes: int,
        timeout_s: float,
        reserve: Reserve = unbounded,
        patterns: Sequence[str] | None = None,
        resolved: Sequence[str] = (),
        own_token: OwnToken = no_token,
    ) -> None:
        self._own_token = own_token
        self._patterns = None if patterns is None else (*patterns, *resolved)
        self._trusted = (*(pattern for pattern in patterns or () if TENANT in pattern), *resolved)
        self._reserve = reserve
        self._endpoint = endpoint
        self._token = token
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    def accepts(self, uri: str) -> bool:
        is_open = self._patterns is None or matches_repository(self._patterns, uri, None)
        return uri.startswith("hf://") and is_open

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:
        """Raises SourceError, NotFound, AdapterTooLarge, and NotReady if the project's own token cannot be read."""
        is_operators = tenant_id == DEFAULT_TENANT or matches_repository(self._trusted, uri, tenant_id)
        token = self._own_token(tenant_id) or (self._token if is_operators else None)
        listing = list_hub_files(uri, endpoint=self._endpoint, token=token, timeout_s=self._timeout_s)
        cards = [name for name in listing.sizes if "/" not in name and name.endswith(CARD_SUFFIX)]
        is_card = len(cards) == 1 and CONFIG_NAME not in listing.sizes
        names = cards if is_card else [CONFIG_NAME, WEIGHTS_NAME]
        signature = signature_name(names)
        texts = [] if is_card else [name for name in TEXT_FILES if name in listing.sizes]
        names += [*texts, *([signature] if signature in listing.sizes else [])]
        num_bytes = sum(listing.sizes.get(name, 0) for name in names)
        if num_bytes <= self._max_bytes:  # otherwise the download refuses it
            self._reserve(folder, num_bytes, self._timeout_s)
        download_hub_files(
            listing,
            names,
            folder,
            max_bytes=self._max_bytes,
            endpoint=self._endpoint,
            token=token,
        )
        return str(listing.uri)
