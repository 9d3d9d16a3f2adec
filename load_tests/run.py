"""A seeded load generator for any OpenAI endpoint: this service, vLLM, LoRAX, a proxy in front of them.

In: a workload (arrivals, popularity, lengths, prefixes, tenants) and an endpoint. Out: NAME.jsonl with the
full configuration, every request and the summary; NAME.md; NAME.png if matplotlib is installed. The plan
is made before anything is sent, and the same seed makes the same plan.

    python -m load_tests.run --url http://127.0.0.1:8000/v1 --models sql,extract,support \
        --arrivals gamma:2 --rate 2 --popularity zipf:1 --requests 200 --slo-ttft 1 --out results/demo
    python -m load_tests.run --url http://127.0.0.1:8000/v1 --models sql --closed-loop 32 --requests 128

Ctrl-C ends it early: what has ended by then is written and reported.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from load_tests import arrivals, lengths, popularity
from load_tests.client import Endpoint, Outcome, closed_loop, open_loop
from load_tests.report import Slo, json_line, markdown, summarise
from load_tests.workload import PlannedRequest, WorkloadConfig, plan


def run(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    num_streams: int | None,
    on_end: Callable[[Outcome], None],
) -> None:
    """Send them all, open loop, or closed loop over `num_streams`. KeyboardInterrupt: `on_end` had what has ended."""
    if num_streams is None:
        asyncio.run(open_loop(endpoint, requests, on_end))
    else:
        asyncio.run(closed_loop(endpoint, requests, num_streams, on_end))


def record(
    out: Path, config: Mapping[str, Any], endpoint: Endpoint, requests: Sequence[PlannedRequest], slo: Slo
) -> tuple[list[Outcome], bool]:
    """Run and write OUT.jsonl, each request's line when it ends, OUT.md and, with matplotlib, OUT.png; print the
    report. The outcomes, and whether they are all of them: not after ctrl-C. OSError for files that cannot be
    written, before anything is sent."""
    outcomes: list[Outcome] = []
    complete = True
    out.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{out}.jsonl").open("w", buffering=1) as file:
        file.write(json_line("config", config))

        def keep(outcome: Outcome) -> None:
            outcomes.append(outcome)
            file.write(json_line("request", outcome))
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)} of {len(requests)} have ended", end="", file=sys.stderr, flush=True)

        try:
            run(endpoint, requests, config["closed_loop"], keep)
        except KeyboardInterrupt:
            complete = False
        if not outcomes:
            return [], complete
        summary = summarise(outcomes, slo, len(requests) - len(outcomes))
        file.write(json_line("summary", summary))
    text = markdown(out.name, summary)
    Path(f"{out}.md").write_text(text)
    print(("\n" if sys.stderr.isatty() else "") + text)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
    elif summary["num_failed"] < summary["num_requests"]:
        from load_tests.plot import plot

        plot(outcomes, out.name, Path(f"{out}.png"))
    return outcomes, complete


def model_names(text: str) -> list[str]:
    """'a,b,c', or '@FILE' with one name per line. Raises argparse.ArgumentTypeError for none, or no such file."""
    try:
        names = Path(text[1:]).read_text().split() if text.startswith("@") else text.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not names or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no model, or an empty one")
    return names


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; '@FILE' reads one. Raises argparse.ArgumentTypeError for anything else."""
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is not a JSON object such as {{"ignore_eos": true}}')
    return value


def above_zero(text: str) -> float:
    """Raises argparse.ArgumentTypeError for anything but a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def streams(text: str) -> int:
    """Raises argparse.ArgumentTypeError for anything but a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def http_url(text: str) -> str:
    """Without a slash at its end. Raises argparse.ArgumentTypeError for what is no address over HTTP."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not start with http:// or https://")
    return text.rstrip("/")


def parser() -> argparse.ArgumentParser:
    """Every option; those of the workload are named after the fields of `WorkloadConfig`."""
    options = argparse.ArgumentParser(description="Seeded load for any OpenAI endpoint.")
    options.add_argument(
        "--url", type=http_url, required=True, help="the endpoint, ending in /v1; the key is taken from OPENAI_API_KEY"
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
    options.add_argument("--rate", type=above_zero, default=2.0, help="requests per second on average, of all tenants")
    options.add_argument("--requests", dest="num_requests", type=int, default=100)
    options.add_argument(
        "--trace", type=Path, help="JSON lines with arrival_s, model, prompt_tokens, output_tokens, tenant"
    )
    options.add_argument("--popularity", default="zipf:1", help=popularity.KINDS)
    options.add_argument("--prompt-lengths", default="fixed:64", help=f"in words: {lengths.KINDS}")
    options.add_argument("--output-lengths", default="fixed:64", help=f"max_tokens: {lengths.KINDS}")
    options.add_argument(
        "--shared-prefix-words", type=int, default=0, help="words that all prompts of one model start with; they count"
    )
    options.add_argument("--tenants", dest="num_tenants", type=int, default=1)
    options.add_argument(
        "--adversary-factor", type=float, default=1.0, help="the last tenant sends this many times what each other does"
    )
    options.add_argument(
        "--api-keys",
        type=lambda path: json_object(f"@{path}"),
        default={},
        metavar="FILE",
        help="JSON file: tenant name (tenant-0, ...) to API key",
    )
    options.add_argument(
        "--extra-body", type=json_object, default={}, help='JSON fields for each request, {"ignore_eos": true}'
    )
    options.add_argument(
        "--closed-loop", type=streams, metavar="STREAMS", help="instead of arrivals: so many at a time"
    )
    options.add_argument("--slo-ttft", type=above_zero, help="objective: first token within so many seconds")
    options.add_argument("--slo-tpot", type=above_zero, help="objective: seconds per further token")
    options.add_argument("--slo-e2e", type=above_zero, help="objective: whole answer within so many seconds")
    options.add_argument("--timeout", type=above_zero, default=600.0, help="seconds until a request has failed")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("results/load"), help="files are OUT.jsonl, OUT.md, OUT.png")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. Exits with 1 when no request succeeded, 2 for options not understood, 130 after ctrl-C."""
    options = parser()
    arguments = options.parse_args(argv)
    config = WorkloadConfig(**{field.name: getattr(arguments, field.name) for field in fields(WorkloadConfig)})
    try:
        trace = []
        if arguments.trace:
            trace = arrivals.read_trace(arguments.trace.read_text().splitlines(), arguments.trace)
        requests = plan(config, arguments.models, arguments.base_model, trace)
    except (ValueError, OSError) as error:
        options.error(str(error))
    endpoint = Endpoint(
        url=arguments.url,
        default_key=os.environ.get("OPENAI_API_KEY", "none"),
        api_keys=arguments.api_keys,
        extra_body=arguments.extra_body,
        timeout_s=arguments.timeout,
    )
    slo = Slo(arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    written = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": asdict(config),
        "models": arguments.models,
        "base_model": arguments.base_model,
        "url": endpoint.url,
        "extra_body": endpoint.extra_body,
        "trace": str(arguments.trace) if arguments.trace else None,
        "closed_loop": arguments.closed_loop,
        "timeout_s": endpoint.timeout_s,
        "slo": asdict(slo),
    }
    try:
        outcomes, complete = record(arguments.out, written, endpoint, requests, slo)
    except OSError as error:
        options.error(f"--out {arguments.out}: {error}")
    if not complete:
        raise SystemExit(130)  # what a shell reports of a program ended by ctrl-C
    if all(outcome.error is not None for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
