"""A seeded load generator for any OpenAI endpoint: this service, vLLM, LoRAX, a proxy in front of them.

In: a workload (arrivals, popularity, lengths, prefixes, tenants) and an endpoint. Out: NAME.jsonl with the
full configuration, every request and the summary; NAME.md; NAME.png if matplotlib is installed. The plan
is made before anything is sent, and the same seed makes the same plan.

    python -m load_tests.run --url http://127.0.0.1:8000/v1 --models sql,extract,support \
        --arrivals gamma:2 --rate 2 --popularity zipf:1 --requests 200 --slo-ttft 1 --out results/demo
    python -m load_tests.run --url http://127.0.0.1:8000/v1 --models sql --closed-loop 32 --requests 128
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from load_tests import arrivals, lengths, popularity
from load_tests.client import Endpoint, Outcome, closed_loop, open_loop
from load_tests.report import Slo, markdown, summarise, write_jsonl
from load_tests.workload import PlannedRequest, WorkloadConfig, plan


def run(endpoint: Endpoint, requests: Sequence[PlannedRequest], num_streams: int | None) -> list[Outcome]:
    """Send them all, open loop, or closed loop over `num_streams`."""
    if num_streams is None:
        return asyncio.run(open_loop(endpoint, requests))
    return asyncio.run(closed_loop(endpoint, requests, num_streams))


def save(out: Path, config: Mapping[str, Any], outcomes: Sequence[Outcome], slo: Slo) -> str:
    """Write OUT.jsonl, OUT.md and, with matplotlib, OUT.png; the Markdown."""
    summary = summarise(outcomes, slo)
    text = markdown(out.name, summary)
    out.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{out}.jsonl").open("w") as file:
        write_jsonl(file, config, outcomes, summary)
    Path(f"{out}.md").write_text(text)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
    elif summary["num_failed"] < summary["num_requests"]:
        from load_tests.plot import plot

        plot(outcomes, out.name, Path(f"{out}.png"))
    return text


def model_names(text: str) -> list[str]:
    """'a,b,c', or '@FILE' with one name per line. Raises argparse.ArgumentTypeError for none, OSError."""
    names = Path(text[1:]).read_text().split() if text.startswith("@") else text.split(",")
    if not names or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no model, or an empty one")
    return names


def parser() -> argparse.ArgumentParser:
    """Every option; those of the workload are named after the fields of `WorkloadConfig`."""
    options = argparse.ArgumentParser(description="Seeded load for any OpenAI endpoint.")
    options.add_argument(
        "--url", required=True, help="the endpoint, ending in /v1; the key is taken from OPENAI_API_KEY"
    )
    options.add_argument(
        "--models",
        type=model_names,
        required=True,
        help="adapters (or models), most popular first: a,b,c or @FILE, one a line",
    )
    options.add_argument("--base-model", help="also ask for this one; see --base-share")
    options.add_argument("--base-share", type=float, default=0.0, help="share of requests for the base model")
    options.add_argument("--arrivals", default="poisson", help=arrivals.KINDS)
    options.add_argument("--rate", type=float, default=2.0, help="requests per second on average")
    options.add_argument("--requests", dest="num_requests", type=int, default=100)
    options.add_argument(
        "--trace", type=Path, help="JSON lines with arrival_s, model, prompt_tokens, output_tokens, tenant"
    )
    options.add_argument("--popularity", default="zipf:1", help=popularity.KINDS)
    options.add_argument("--prompt-lengths", default="fixed:64", help=f"in words: {lengths.KINDS}")
    options.add_argument("--output-lengths", default="fixed:64", help=f"max_tokens: {lengths.KINDS}")
    options.add_argument(
        "--shared-prefix-words", type=int, default=0, help="words that all prompts of one model start with"
    )
    options.add_argument("--tenants", dest="num_tenants", type=int, default=1)
    options.add_argument(
        "--adversary-factor", type=float, default=1.0, help="the last tenant sends this many times more"
    )
    options.add_argument("--api-keys", type=Path, help="JSON file: tenant name (tenant-0, ...) to API key")
    options.add_argument(
        "--extra-body", type=json.loads, default={}, help='JSON fields for each request, {"ignore_eos": true}'
    )
    options.add_argument("--closed-loop", type=int, metavar="STREAMS", help="instead of arrivals: so many at a time")
    options.add_argument("--slo-ttft", type=float, help="objective: first token within so many seconds")
    options.add_argument("--slo-tpot", type=float, help="objective: seconds per further token")
    options.add_argument("--slo-e2e", type=float, help="objective: whole answer within so many seconds")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds until a request has failed")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("results/load"), help="files are OUT.jsonl, OUT.md, OUT.png")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. Exits with 1 when no request succeeded."""
    arguments = parser().parse_args(argv)
    config = WorkloadConfig(**{field.name: getattr(arguments, field.name) for field in fields(WorkloadConfig)})
    trace = []
    if arguments.trace:
        trace = arrivals.read_trace(arguments.trace.read_text().splitlines(), arguments.trace)
    requests = plan(config, arguments.models, arguments.base_model, trace)
    endpoint = Endpoint(
        url=arguments.url.rstrip("/"),
        default_key=os.environ.get("OPENAI_API_KEY", "none"),
        api_keys=json.loads(arguments.api_keys.read_text()) if arguments.api_keys else {},
        extra_body=arguments.extra_body,
        timeout_s=arguments.timeout,
    )
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    outcomes = run(endpoint, requests, arguments.closed_loop)
    written = {
        "workload": asdict(config),
        "models": arguments.models,
        "base_model": arguments.base_model,
        "url": endpoint.url,
        "extra_body": endpoint.extra_body,
        "trace": str(arguments.trace) if arguments.trace else None,
        "closed_loop": arguments.closed_loop,
        "slo": asdict(slo),
    }
    print(save(arguments.out, written, outcomes, slo))
    if all(outcome.error is not None for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
