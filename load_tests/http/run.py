"""A seeded load generator for any OpenAI endpoint: this service, vLLM, LoRAX, a proxy in front of them.

Writes NAME.jsonl with the full configuration, every request and the summary; NAME.md; NAME.png if matplotlib is
installed. The plan (arrivals, popularity, lengths, prefixes, tenants) is made before anything is sent, and the same
seed makes the same plan.

    python -m load_tests.http.run --url http://127.0.0.1:8000/v1 --models sql,extract,support \
        --arrivals gamma:2 --rate 2 --popularity zipf:1 --requests 200 --slo-ttft 1 --out results/demo
    python -m load_tests.http.run --url http://127.0.0.1:8000/v1 --models sql --closed-loop 32 --requests 128

Ctrl-C ends it early: finished requests are written and reported.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from app.simulation.trace import TraceEntry, read_trace
from load_tests import arrivals, popularity
from load_tests.http import lengths
from load_tests.http.client import Endpoint, Outcome, closed_loop, open_loop
from load_tests.http.report import Slo, json_line, markdown, summarise
from load_tests.http.workload import PlannedRequest, WorkloadConfig, plan

#: Tenants in the words of an error; a trace may have thousands.
MOST_NAMES = 8


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


class RunResult(NamedTuple):
    """A recorded run. `complete`: the outcomes are of all requests; not after ctrl-C. `report`: for people, empty
    without outcomes.
    """

    outcomes: list[Outcome]
    complete: bool
    report: str


def record(
    out: Path, config: Mapping[str, Any], endpoint: Endpoint, requests: Sequence[PlannedRequest], slo: Slo
) -> RunResult:
    """Run and write OUT.jsonl, each request's line when it ends, OUT.md and, with matplotlib, OUT.png. What an older
    run left there is gone before anything is sent. OSError for files that cannot be written, before that too."""
    outcomes: list[Outcome] = []
    complete = True
    out.parent.mkdir(parents=True, exist_ok=True)
    report_path, plot_path = Path(f"{out}.md"), Path(f"{out}.png")
    with Path(f"{out}.jsonl").open("a", buffering=1) as file:
        for path in (report_path, plot_path):
            path.unlink(missing_ok=True)
        file.truncate(0)  # now that all three can be written
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
            return RunResult([], complete, "")
        summary = summarise(outcomes, slo, len(requests) - len(outcomes))
        file.write(json_line("summary", summary))
    text = markdown(out.name, summary)
    report_path.write_text(text)
    if importlib.util.find_spec("matplotlib") is None:
        text += "\nno plot: matplotlib is not installed\n"
    elif summary["num_failed"] < summary["num_requests"]:
        from load_tests.http.plot import plot

        plot(outcomes, out.name, plot_path)
    return RunResult(outcomes, complete, text)


def show(report: str) -> None:
    """Print to stdout if it is still read; the files have everything."""
    try:
        print(("\n" if sys.stderr.isatty() else "") + report, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's end fails at it again


def check_keys(default_key: str, api_keys: Mapping[str, object], tenants: Collection[str]) -> None:
    """ValueError for a key that cannot be sent in a header, or is of no tenant. Keys are not in its words."""
    if strange := sorted(set(api_keys) - set(tenants)):
        raise ValueError(f"--api-keys names {strange[0]!r}, but the tenants are {_some(sorted(tenants))}")
    named = {f"--api-keys: the key of {tenant!r}": key for tenant, key in api_keys.items()}
    for name, key in {"OPENAI_API_KEY": default_key, **named}.items():
        if not isinstance(key, str) or not key.isprintable():
            raise ValueError(f"{name} must be text without line breaks and other control characters")


def tenant_names(config: WorkloadConfig, trace: Sequence[TraceEntry]) -> set[str]:
    """Tenants that may have a request in such a plan."""
    drawn = not trace or any(entry.tenant is None for entry in trace)
    numbered = {f"tenant-{i}" for i in range(config.num_tenants)} if drawn else set()
    return numbered | {entry.tenant for entry in trace if entry.tenant is not None}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def trace_entries(path: Path) -> list[TraceEntry]:
    """See `read_trace`. ValueError, OSError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    return read_trace(text.split("\n"), path)


def model_names(text: str) -> list[str]:
    """'a,b,c', or '@FILE' with one name per line. Raises argparse.ArgumentTypeError for none, or no such file."""
    try:
        names = Path(text[1:]).read_text().split() if text.startswith("@") else text.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if not names or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no model, or an empty one")
    return names


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; '@FILE' reads one. Raises argparse.ArgumentTypeError for anything else."""
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: deep JSON
        raise argparse.ArgumentTypeError(f"{text[:80]}: {error}") from error
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
        "--closed-loop", type=streams, metavar="STREAMS", help="this many requests at a time instead of arrivals"
    )
    options.add_argument("--slo-ttft", type=above_zero, help="objective: seconds to the first token")
    options.add_argument("--slo-tpot", type=above_zero, help="objective: seconds per further token")
    options.add_argument("--slo-e2e", type=above_zero, help="objective: seconds to the end of the answer")
    options.add_argument("--timeout", type=above_zero, default=600.0, help="seconds until a request has failed")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("results/load"), help="files are OUT.jsonl, OUT.md, OUT.png")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. Exits with 1 when no request succeeded, 2 for options not understood, 130 after ctrl-C."""
    options = parser()
    arguments = options.parse_args(argv)
    config = WorkloadConfig(**{field.name: getattr(arguments, field.name) for field in fields(WorkloadConfig)})
    default_key = os.environ.get("OPENAI_API_KEY", "none")
    try:
        trace = trace_entries(arguments.trace) if arguments.trace else []
        if arguments.closed_loop and config.popularity.startswith("hotset"):
            raise ValueError(
                f"--closed-loop has no arrival times, by which --popularity {config.popularity} turns; choose another"
            )
        requests = plan(config, arguments.models, arguments.base_model, trace)
        check_keys(default_key, arguments.api_keys, tenant_names(config, trace))
    except (ValueError, OSError) as error:
        options.error(str(error))
    endpoint = Endpoint(
        url=arguments.url,
        default_key=default_key,
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
        recorded = record(arguments.out, written, endpoint, requests, slo)
    except OSError as error:
        options.error(f"--out {arguments.out}: {error}")
    show(recorded.report)
    if not recorded.complete:
        raise SystemExit(130)  # what a shell reports of a program ended by ctrl-C
    if all(outcome.error is not None for outcome in recorded.outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
