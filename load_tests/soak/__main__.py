"""Soak test: one service under 70 % of its load for hours, while adapters, batches, projects and keys come and go.

    make soak                                     # two hours
    python -m load_tests.soak --minutes 10

A tiny model with 2,000 adapters, of which 20 fit on the device, behind HAProxy (`polylora serve`). Every answer is
compared with that of an engine in this process. Prints a report in JSON; the status is 1 if an answer was wrong or
missing, if usage is not what clients were answered, if something rises for an hour (`load_tests.soak.resources`), or if
after more than half an hour the last tenth of the time answers more than 5 % slower than the first. Needs the packages
of the extra `test`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from app.config import ADMIN_KEY, SECRETS_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.request import SamplingParams
from load_tests.chaos.__main__ import staged_files
from load_tests.http.bench_adversary import project_key, projects_of
from load_tests.service import Service, free_port, serve_arguments
from load_tests.soak.churn import Churn
from load_tests.soak.resources import Resources
from load_tests.soak.traffic import NUM_TOKENS, PROMPT, Traffic
from load_tests.stats import environment
from tests.e2e.process import tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model

NUM_RESIDENT, MOST_RANK = 20, 16
#: Adapters that come and go, beside those that are asked all the time.
NUM_CHANGING = 16
SAMPLE_EVERY_S, CAPACITY_S, NUM_STREAMS = 15.0, 20.0, 32
LOAD = 0.7
#: Latency is judged over runs at least this long.
JUDGED_MINUTES, MOST_SLOWER = 30.0, 1.05
#: Usage is written once in a while.
USAGE_WITHIN_S = 120.0
ENGINE = {"num_kv_blocks": 1024, "lora_pool_rows": NUM_RESIDENT * MOST_RANK, "max_num_seqs": 32}


def save_adapters(folder: Path, count: int) -> dict[str, Path]:
    """So many folders under `folder`/loras by name, and those that come and go after them."""
    names = [f"a{index:04}" for index in range(count)] + [f"c{index:02}" for index in range(NUM_CHANGING)]
    paths = {name: folder / "loras" / name for name in names}
    for seed, path in enumerate(paths.values()):
        save_adapter(path, rank=1 + seed % MOST_RANK, seed=seed)
    return paths


def answers(model: Path, paths: dict[str, Path]) -> dict[str, str]:
    """Greedy answers by an engine in this process, by name."""
    config = EngineConfig.model_validate({**ENGINE, "max_queued_requests": len(paths) + 1})
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(model, config) as llm:
        found = llm.generate([PROMPT] * len(paths), list(paths.values()), sampling)
    return {name: answer.text for name, answer in zip(paths, found, strict=True)}


async def usage_of(http: httpx.AsyncClient, since: int) -> int:
    """Generated tokens in the usage of all projects."""
    query: dict[str, Any] = {"start_time": since, "bucket_width": "1d", "limit": 7}
    found = (await http.get("/v1/organization/usage/completions", params=query)).raise_for_status().json()
    return sum(result["output_tokens"] for bucket in found["data"] for result in bucket["results"])


async def check_usage(http: httpx.AsyncClient, since: int, num_tokens: int, num_abandoned: int) -> list[str]:
    """Usage must have all tokens that clients were answered, and of abandoned answers at most what they asked for."""
    most, found, deadline_s = num_tokens + num_abandoned * NUM_TOKENS, 0, time.monotonic() + USAGE_WITHIN_S
    while time.monotonic() < deadline_s:
        found = await usage_of(http, since)
        if num_tokens <= found <= most:
            return []
        await asyncio.sleep(2.0)
    return [f"usage has {found} generated tokens; clients were answered {num_tokens}, and at most {most}"]


async def run(service: Service, url: str, admin_key: str, expected: dict[str, str], minutes: float) -> dict[str, Any]:
    """Run the test on a started service; returns the report."""
    since = int(time.time())
    headers = {"Authorization": f"Bearer {admin_key}"}
    changing = {name: text for name, text in expected.items() if name.startswith("c")}
    asked = {name: text for name, text in expected.items() if name not in changing}
    projects = projects_of(f"{url}/v1", admin_key)
    keys = [project_key(projects, projects.create(name=f"tenant-{index}").id) for index in range(4)]
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as http:
        entries = [{"name": name, "path": name} for name in expected]
        (await http.post("/v1/loras/manifest", json={"adapters": entries})).raise_for_status()
        traffic, churn = Traffic(url, asked, keys, seed=0), Churn(url, admin_key, keys[0], changing)
        await traffic.warm_up(NUM_STREAMS)
        shown = set[str]()
        async with asyncio.TaskGroup() as group:
            group.create_task(churn.run())
            capacity = await traffic.capacity(NUM_STREAMS, CAPACITY_S)
            resources, began_s = Resources(service.process.pid, service.folder), time.monotonic()
            group.create_task(traffic.run(LOAD * capacity))
            while (passed_s := time.monotonic() - began_s) < 60 * minutes:
                await asyncio.to_thread(resources.sample)
                wrongs = {*traffic.wrongs, *churn.wrongs}
                print(
                    *sorted(wrongs - shown), f"{passed_s / 60:.0f} of {minutes:g} min: {dict(traffic.ended)}, "
                    f"{dict(churn.done)}, {len(wrongs)} wrong", sep="\n", file=sys.stderr, flush=True,
                )  # fmt: skip
                shown = wrongs
                await asyncio.sleep(SAMPLE_EVERY_S)
            traffic.stop()
            churn.stop()
        counts = traffic.ended
        num_answers = counts["streamed"] + 3 * counts["three answers"] + counts["sampled"] + churn.num_answers
        usage = await check_usage(http, since, num_answers * NUM_TOKENS, counts["abandoned"])
    tenth_s = 6 * minutes
    tenths: list[list[float]] = [[] for _ in range(10)]
    for due_s, seconds in traffic.times_s:
        tenths[min(int((due_s - began_s) / tenth_s), 9)].append(seconds)
    medians = [float(np.median(tenth)) if tenth else float("nan") for tenth in tenths]
    slower = medians[-1] / medians[0]
    late = [f"the last tenth of the time answered in {slower:.2f} of the first's"]
    return {
        "machine": environment(),
        "minutes": minutes,
        "requests a second": round(LOAD * capacity, 1),
        "requests": dict(counts),
        "changes": dict(churn.done),
        "latency of each tenth of the time / first": [round(median / medians[0], 3) for median in medians],
        "change per hour": {name: round(slope, 4) for name, slope in sorted(resources.slopes().items())},
        "median of each tenth of the time": dict(sorted(resources.tenths().items())),
        "at the end": {name: values[-1] for name, values in sorted(resources.series.items())},
        "wrong": [
            *traffic.wrongs,
            *churn.wrongs,
            *resources.wrongs(),
            *usage,
            *(late if minutes >= JUDGED_MINUTES and not slower <= MOST_SLOWER else []),
            *staged_files(service.folder),
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--adapters", type=int, default=2000)
    options = parser.parse_args(arguments)
    port, admin_key = free_port(), new_key(is_admin=True).value
    with tempfile.TemporaryDirectory(prefix="pls") as name:
        folder = Path(name)
        save_tiny_model(folder / "model")
        paths = save_adapters(folder, options.adapters)
        expected = answers(folder / "model", paths)
        document = tiny_document(port, folder, ENGINE)
        document["applications"][0]["deployments"][0]["num_replicas"] = 2
        settings = folder / "serve.yaml"
        settings.write_text(yaml.safe_dump(document))
        environment = {ADMIN_KEY: admin_key, SECRETS_KEY: secrets.token_hex(32)}
        with Service(serve_arguments(str(settings), port), environment) as service:
            service.wait_for("Ready after")
            url = f"http://127.0.0.1:{port}"
            report = asyncio.run(run(service, url, admin_key, expected, options.minutes))
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
