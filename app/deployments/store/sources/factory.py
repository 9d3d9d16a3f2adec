"""The sources that a configuration allows.

In: `AdaptersConfig` and the environment (`LORA_HF_TOKEN`, `LORA_DOWNLOADER_PLUGIN`). Out: `Sources`.
Raises ConfigError for a downloader that cannot be imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from app.config import AdaptersConfig
from app.deployments.store.sources.fetch_timeout import FetchTimeout
from app.deployments.store.sources.hub import HubFetcher
from app.deployments.store.sources.plugin import PluginFetcher
from app.deployments.store.sources.source_resolution import Fetcher, Reserve, Sources, unbounded
from app.deployments.store.sources.urls import UrlFetcher


def open_sources(
    config: AdaptersConfig,
    environ: Mapping[str, str] | None = None,
    *,
    base_name: str,
    reserve: Reserve = unbounded,
    uploads: Path | None = None,
) -> Sources:
    """URLs first, then the operator's downloader, then the hub; each within its time.

    `reserve` finds room for what the hub and web servers say they will send; of a downloader's bytes nothing is known.
    `base_name`: what clients call the base model, for a downloader. `uploads`: where adapters lie that came as bytes.
    """
    environ = os.environ if environ is None else environ
    max_bytes, timeout_s = config.max_adapter_bytes, config.source_timeout_s
    fetchers: list[Fetcher] = []
    if config.urls:
        fetchers.append(
            UrlFetcher(
                config.urls,
                options=config.url_options,
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                signatures=config.signing.trust.matter,
                reserve=reserve,
            )
        )
    custom_fetcher = config.custom_fetcher or environ.get("LORA_DOWNLOADER_PLUGIN")
    if custom_fetcher:
        fetchers.append(PluginFetcher(custom_fetcher, base_name))
    elif config.allow_hub:
        token = environ.get("LORA_HF_TOKEN")
        fetchers.append(
            HubFetcher(config.hub_endpoint, token, max_bytes=max_bytes, timeout_s=timeout_s, reserve=reserve)
        )
    timed = [FetchTimeout(fetcher, timeout_s) for fetcher in fetchers]

    def abandon(uri: str) -> None:
        for fetcher in timed:
            fetcher.abandon(uri)

    return Sources([Path(root) for root in config.roots], timed, abandon, uploads)
