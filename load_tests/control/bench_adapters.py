"""Costs of loading an adapter: disk, host memory, rows, first token; and a thousand adapters with room for few.

Prints Markdown. Store, reader process, registry and engine are the service's own; there is no Ray, so the host copy is
a copy in this process instead of one in the object store. Adapters are random. "Cold" drops the files from the page
cache before each read.

    python -m load_tests.control.bench_adapters --adapters 1000 --resident 16 --requests 600
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config import AdaptersConfig, AppConfig
from app.deployments.registry.jobs.failure_backoff import FailureBackoff
from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
from app.deployments.registry.jobs.preload import Preloader
from app.deployments.registry.models import DEFAULT_TENANT, UPLOADED, CatalogEntry, LoadRequest
from app.deployments.registry.registry import open_registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.adapter_reader import AdapterReader, open_adapter_reader
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.service import StoreParts, StoreService
from app.deployments.store.tier_counters import TierCounters
from app.deployments.store.uploads import Uploads
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.sandbox.packing import PackedAdapter, unpack_adapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.random_adapters import write_random_adapter
from load_tests.stats import Spread, environment, spread

#: Requests in flight at once while the many are served.
CONCURRENT = 32


@dataclass(frozen=True)
class Settings:
    """The command line, checked. `rank` and all projections for the costs; `small_rank` of q_proj for the many."""

    model: Path
    rank: int = 16
    num_repeats: int = 15
    num_adapters: int = 1000
    num_resident: int = 16
    num_host: int = 200
    num_requests: int = 600
    num_tokens: int = 4
    small_rank: int = 8
    num_threads: int = 0
    seed: int = 0


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    with tempfile.TemporaryDirectory() as folder:
        costs = asyncio.run(_costs(settings, checkpoint, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        many = asyncio.run(_many(settings, checkpoint, Path(folder)))
    return (
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}.\n\n{costs}\n\n{many}"
    )


class _Service:
    """Store, registry and engine, as a replica has them, in one process."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, config: EngineConfig, host_bytes: int) -> None:
        adapters = AdaptersConfig(roots=(str(folder),), state_dir=str(folder / "state"), host_cache_bytes=host_bytes)
        (folder / "state").mkdir()
        settings = AppConfig(adapters=adapters, engine=config)
        counts, events = TierCounters(), TierEvents()
        uploads = Uploads(folder / "state" / "uploads", adapters.disk_cache_bytes, time.monotonic)
        self.library: AdapterReader = open_adapter_reader(
            adapters, checkpoint, FEATURES, counts, events, uploads=uploads.folder
        )
        self.registry = open_registry(settings, checkpoint.spec.digest)
        self.store: HostAdapterCache[PackedAdapter] = HostAdapterCache(
            self.library, _host_copy, events, max_bytes=host_bytes, counts=counts
        )
        self.registry_service = RegistryService(self.registry, self.store, events)
        unread = LazyRegistrations(self.registry, self.registry_service, FailureBackoff())
        preloader = Preloader(self.registry, self.registry_service)
        none: Any = None
        parts = StoreParts(
            self.registry, self.registry_service, self.store, preloader, unread, none, uploads, apply_settings=none
        )
        self._calls = StoreService(parts, lambda: None)
        self.backend = load_backend(checkpoint, config)
        self.engine = Engine(self.backend, config)

    async def register(self, name: str, source: str) -> CatalogEntry:
        return (await self.registry_service.load_and_wait(LoadRequest(DEFAULT_TENANT, name, source, "bench")))[1]

    async def upload(self, name: str, config: bytes, weights: bytes) -> CatalogEntry:
        """Like PUT /v1/loras/{name}/weights once the body has arrived."""
        request = LoadRequest(DEFAULT_TENANT, name, UPLOADED, "bench")
        upload_id = await self._calls.begin_upload(request, config)
        await self._calls.write_upload(upload_id, 0, weights)
        return (await self._calls.end_upload(request, upload_id))[1]

    async def adapter(self, ref: AdapterRef) -> LoraAdapter:
        return unpack_adapter(*await self.store.fetch(ref))

    def first_token(self, request_id: str, ref: AdapterRef, adapter: LoraAdapter) -> None:
        request = GenerateRequest(request_id, "bench", (5,), SamplingParams(max_tokens=1, temperature=0.0), ref)
        self.engine.submit(request, adapter)
        while self.engine.has_work:
            for chunk in self.engine.step():
                if chunk.error is not None:
                    raise chunk.error

    def drop(self, digest: str) -> int:
        """Unload an adapter; returns the freed rows."""
        dropped = self.engine.unload_adapter(digest)
        while not dropped.done():
            self.engine.step()
        return dropped.result()

    def close(self) -> None:
        self.store.close()
        self.library.close()
        self.registry.close()
        self.backend.close()


def _host_bytes(settings: Settings, spec: ModelSpec) -> int:
    """Bytes of `num_host` small adapters: two per value, in bfloat16."""
    d_in, d_out = target_shape(spec, 0, "q_proj")
    return max(1 << 20, settings.num_host * len(spec.layers) * settings.small_rank * (d_in + d_out) * 2)


def _host_copy(packed: PackedAdapter) -> PackedAdapter:
    return PackedAdapter(packed.header, [array.copy() for array in packed.arrays])


async def _costs(settings: Settings, checkpoint: Checkpoint, folder: Path) -> str:
    folders = [
        write_random_adapter(
            folder / f"a{i}", checkpoint.spec, settings.rank, settings.seed + i, DENSE_TARGETS, bf16=True
        )
        for i in range(settings.num_repeats)
    ]
    size_bytes = sum(file.stat().st_size for file in folders[0].iterdir())
    cpu = CpuConfig(num_threads=settings.num_threads)
    config = EngineConfig(cpu=cpu, lora_pool_rows=8 * settings.rank, num_kv_blocks=64)
    service = _Service(checkpoint, folder, config, host_bytes=1 << 30)
    service.library.from_source(str(folders[0]))  # the reader process is up
    warm_s = [_elapsed_s(lambda path=path: service.library.from_source(str(path))) for path in folders]
    cold_s = []
    for path in folders:
        _drop_from_page_cache(path)
        cold_s.append(_elapsed_s(lambda path=path: service.library.from_source(str(path))))
    apply_s, prepare_s, rows_s, remove_s = [], [], [], []
    for index, path in enumerate(folders):
        started_s = time.perf_counter()
        entry = await service.register(path.name, str(path))
        adapter = await service.adapter(entry.ref)
        service.first_token(f"r{index}", entry.ref, adapter)
        apply_s.append(time.perf_counter() - started_s)
        fresh = replace(adapter)  # a copy without cached results
        prepare_s.append(_elapsed_s(lambda fresh=fresh: service.backend.prepare_adapter(fresh)))
        rows_s.append(_elapsed_s(lambda fresh=fresh: service.backend.write_adapter(1, 0, fresh)))
        started_s = time.perf_counter()
        unload, _ = await service.registry_service.unloads.begin(path.name, tenant_id=DEFAULT_TENANT, who="bench")
        await service.registry_service.unloads.end(unload)
        assert service.drop(entry.ref.digest) > 0
        remove_s.append(time.perf_counter() - started_s)
    upload_s = []
    for path in folders:
        config_json, weights = (path / CONFIG_NAME).read_bytes(), (path / WEIGHTS_NAME).read_bytes()
        started_s = time.perf_counter()
        await service.upload("uploaded", config_json, weights)
        upload_s.append(time.perf_counter() - started_s)
    service.close()
    lines = [
        f"Rank {settings.rank} on all projections, bf16, {size_bytes / 1e6:.1f} MB; "
        f"median (lowest to highest) of {settings.num_repeats} adapters.",
        "",
        "| | ms |",
        "|---|---:|",
        *(
            f"| {what} | {_ms(spread(values))} |"
            for what, values in (
                ("disk → usable, warm page cache", warm_s[1:]),
                ("disk → usable, cold page cache", cold_s),
                ("prepared, when a request for it arrives, beside a step", prepare_s[1:]),
                ("host → rows, in a step", rows_s[1:]),
                ("apply: register, read, rows, first token", apply_s[1:]),
                ("remove: unregister, rows free", remove_s),
                ("upload → routable: both files kept, read, registered", upload_s[1:]),
            )
        ),
    ]
    return "\n".join(lines)


async def _many(settings: Settings, checkpoint: Checkpoint, folder: Path) -> str:
    rng = random.Random(settings.seed)
    for i in range(settings.num_adapters):
        write_random_adapter(folder / f"a{i}", checkpoint.spec, settings.small_rank, i, ["q_proj"], bf16=True)
    config = EngineConfig(
        cpu=CpuConfig(num_threads=settings.num_threads),
        lora_pool_rows=settings.num_resident * settings.small_rank,
        max_loras=settings.num_resident + 1,
        max_num_seqs=CONCURRENT,
        num_kv_blocks=CONCURRENT * 4,
        enable_prefix_caching=False,
    )
    service = _Service(checkpoint, folder, config, _host_bytes(settings, checkpoint.spec))
    started_s = time.perf_counter()
    entries = await asyncio.gather(*(service.register(f"a{i}", f"a{i}") for i in range(settings.num_adapters)))
    registered_s = time.perf_counter() - started_s
    weights = [1 / (index + 1) for index in range(settings.num_adapters)]
    requested = rng.choices(entries, weights, k=settings.num_requests)
    before = service.store.counts.of("host")
    errors = await _serve(service, [entry.ref for entry in requested], settings, checkpoint.spec.vocab_size, rng)
    host = service.store.counts.of("host")
    hits, misses = (host.get(name, 0) - before.get(name, 0) for name in ("hits", "misses"))
    writes = service.engine.stats().num_adapter_writes
    elapsed_s = time.perf_counter() - started_s - registered_s
    service.close()
    return "\n".join(
        [
            f"{settings.num_adapters} adapters registered (rank {settings.small_rank}), "
            f"room for {settings.num_resident} on device "
            f"and {host['held_adapters']:.0f} in host memory; {settings.num_requests} requests, Zipf(1), "
            f"{CONCURRENT} at a time, {settings.num_tokens} tokens each.",
            "",
            "| | |",
            "|---|---:|",
            f"| registering, four at a time | {1000 * registered_s / settings.num_adapters:.1f} ms each |",
            f"| found on device | {1 - writes / settings.num_requests:.0%} of requests |",
            f"| found in host memory | {hits / (hits + misses):.0%} of requests |",
            f"| requests per second | {settings.num_requests / elapsed_s:.1f} |",
            f"| errors | {errors} |",
        ]
    )


async def _serve(
    service: _Service, refs: Sequence[AdapterRef], settings: Settings, vocab_size: int, rng: random.Random
) -> int:
    """Number of requests that ended with an error."""
    sampling = SamplingParams(max_tokens=settings.num_tokens, temperature=0.0, ignore_eos=True)
    pending = list(enumerate(refs))[::-1]
    running, errors = 0, 0
    while pending or running:
        while pending and running < CONCURRENT:
            index, ref = pending.pop()
            prompt = tuple(rng.randrange(vocab_size) for _ in range(8))
            service.engine.submit(
                GenerateRequest(f"r{index}", "bench", prompt, sampling, ref), await service.adapter(ref)
            )
            running += 1
        for chunk in service.engine.step():
            if chunk.finish_reason is not None:
                running -= 1
                errors += chunk.error is not None
    return errors


def _elapsed_s(work: object) -> float:
    started_s = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started_s


def _drop_from_page_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _ms(values: Spread) -> str:
    return f"{1000 * values.median:.1f} ({1000 * values.low:.1f} to {1000 * values.high:.1f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time an adapter's way from disk to its first token.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--resident", type=int, default=16, help="adapters that fit on the device")
    parser.add_argument("--host", type=int, default=200, help="adapters that fit in host memory")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = Settings(
        model=resolve_model(arguments.model),
        rank=arguments.rank,
        num_repeats=arguments.repeats,
        num_adapters=arguments.adapters,
        num_resident=arguments.resident,
        num_host=arguments.host,
        num_requests=arguments.requests,
        num_threads=arguments.threads,
        seed=arguments.seed,
    )
    print(run(settings))


if __name__ == "__main__":
    main()
