"""Whether the time to the first token reveals that another tenant has sent the same prompt.

Prints the AUC (the chance that a prompt which was sent before is answered sooner than a new one, ties counted half)
with its 95 % bootstrap interval, over trials in which another tenant sent it before and, as a control of the
measurement, in which the same tenant did. 0.5 reveals nothing. For a service also: whether the time to a 404 tells
another tenant's adapter from an unknown name. Prompts are new in each trial; the case is drawn at random, and in both
one prompt is computed before the timed one. `--engine` measures without threads, Ray and HTTP, which only add noise.

    python -m load_tests.http.bench_cache_timing --trials 2000
    python -m load_tests.http.bench_cache_timing --trials 2000 --engine
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray

from app.cli.config_file import read_settings
from app.config import ADMIN_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import resolve_model
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.http.bench_adversary import project_key, projects_of
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment

ATTACKER, VICTIM = "attacker", "victim"
#: The engine's salts, which a service derives from tenants' secrets.
_SALTS = {ATTACKER: b"a" * 32, VICTIM: b"v" * 32}
#: Names of equal length: the victim's adapter, and an unknown one.
_VICTIMS_NAME, _NOBODYS_NAME = "victims-adapter", "nobodys-adapter"
#: Trials that do not count: the first steps of an engine are slower.
_NUM_WARM_UP = 10
_NUM_RESAMPLES = 1000

#: Sends a tenant's prompt; seconds to the first token, which is the only one.
Ask = Callable[[str, tuple[int, ...]], float]


class Auc(NamedTuple):
    """AUC with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def auc(sooner: Sequence[float], others: Sequence[float]) -> float:
    """The chance that a value of `sooner` is smaller than one of `others`, ties counted half. Raises ValueError for
    none of either."""
    if not sooner or not others:
        raise ValueError("an AUC compares values of two kinds; there are none of one")
    ordered: NDArray[np.float64] = np.sort(np.asarray(others, np.float64))
    values = np.asarray(sooner, np.float64)
    larger = len(ordered) - np.searchsorted(ordered, values, side="right")
    equal = np.searchsorted(ordered, values, side="right") - np.searchsorted(ordered, values, side="left")
    return float((larger + 0.5 * equal).mean() / len(ordered))


def auc_of(times_s: dict[bool, list[float]], rng: np.random.Generator) -> Auc:
    """AUC of times by case (True against False); the interval by resampling trials."""
    so, others = np.asarray(times_s[True]), np.asarray(times_s[False])
    again = [
        auc(rng.choice(so, len(so)).tolist(), rng.choice(others, len(others)).tolist()) for _ in range(_NUM_RESAMPLES)
    ]
    low, high = np.percentile(again, (2.5, 97.5))
    return Auc(auc(times_s[True], times_s[False]), float(low), float(high))


class Bench:
    """New prompts of `num_tokens` and a way to send them."""

    def __init__(self, ask: Ask, vocab_size: int, num_tokens: int, seed: int = 0) -> None:
        self._ask = ask
        self._vocab_size, self._num_tokens = vocab_size, num_tokens
        self._rng = np.random.default_rng(seed)
        self._resampling = np.random.default_rng(seed + 1)

    def measure(self, num_trials: int, before: str) -> Auc:
        """AUC of the attacker's times: `before` has sent the same prompt, against another one."""
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-_NUM_WARM_UP, num_trials):
            is_same = bool(self._rng.random() < 0.5)
            prompt = self._prompt()
            self._ask(before, prompt if is_same else self._prompt())
            time_s = self._ask(ATTACKER, prompt)
            if number >= 0:
                times_s[is_same].append(time_s)
        return auc_of(times_s, self._resampling)

    def measure_names(self, num_trials: int, time_refusal: Callable[[str], float]) -> Auc:
        """AUC of the times to a 404: another tenant's adapter against an unknown name."""
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-_NUM_WARM_UP, num_trials):
            is_anothers = bool(self._rng.random() < 0.5)
            time_s = time_refusal(_VICTIMS_NAME if is_anothers else _NOBODYS_NAME)
            if number >= 0:
                times_s[is_anothers].append(time_s)
        return auc_of(times_s, self._resampling)

    def _prompt(self) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, self._vocab_size, self._num_tokens).tolist())


class EngineTenants:
    """An engine's requests. `clock` gives seconds."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._num_requests = 0

    def ask(self, who: str, prompt: tuple[int, ...]) -> float:
        """See `Ask`."""
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerateRequest(f"r{self._num_requests}", who, prompt, sampling, cache_salt=_SALTS[who])
        started_s = self._clock()
        self._engine.submit(request)
        while not any(chunk.request_id == request.request_id for chunk in self._engine.step()):
            pass
        return self._clock() - started_s


class ServiceTenants:
    """A service's requests, each tenant's with its project's key, through a connection that stays open."""

    def __init__(self, url: str, admin_key: str, model: str, adapter: str) -> None:
        """url: up to /v1. adapter: the place of one, loaded as the victim's."""
        projects = projects_of(url, admin_key)
        ids = {who: projects.create(name=who).id for who in (ATTACKER, VICTIM)}
        self._model = model
        self._http = {
            who: httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {project_key(projects, project_id)}"},
                timeout=600,
            )
            for who, project_id in ids.items()
        }
        httpx.post(
            f"{url}/load_lora_adapter",
            headers={"Authorization": f"Bearer {admin_key}", "OpenAI-Project": ids[VICTIM]},
            json={"lora_name": _VICTIMS_NAME, "lora_path": adapter},
            timeout=600,
        ).raise_for_status()

    def ask(self, who: str, prompt: tuple[int, ...]) -> float:
        """See `Ask`. Raises RuntimeError for an answer without a token."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "ignore_eos": True, "stream": True}
        started_s = time.perf_counter()
        with self._http[who].stream("POST", "/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            took_s = time.perf_counter() - started_s
            if answer.status_code != 200 or not first.startswith("data: {"):
                raise RuntimeError(f"{answer.status_code}: {first}")
            for _ in lines:  # to its end, or the connection is closed
                pass
        return took_s

    def time_refusal(self, name: str) -> float:
        """Seconds to the attacker's 404. Raises RuntimeError for another answer."""
        started_s = time.perf_counter()
        answer = self._http[ATTACKER].post("/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
        took_s = time.perf_counter() - started_s
        if answer.status_code != 404:
            raise RuntimeError(f"{name}: {answer.status_code}")
        return took_s


@contextmanager
def serving(config: Path, model: str, adapter: str) -> Iterator[ServiceTenants]:
    """Two tenants of a new service."""
    admin_key, port = new_key(is_admin=True).value, free_port()
    with Service(serve_arguments(str(config), port), {ADMIN_KEY: admin_key}) as service:
        service.wait_for("Ready after")
        yield ServiceTenants(f"http://127.0.0.1:{port}/v1", admin_key, model, adapter)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="AUC of telling another tenant's prompts by the time they take.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--adapter", default="sql", help="the place of one, below the configuration's roots")
    parser.add_argument("--engine", action="store_true", help="the engine alone")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--control-trials", type=int, default=200, help="in which the same tenant asked before")
    parser.add_argument("--tokens", type=int, default=33, help="of each prompt")
    given = parser.parse_args()
    machine, settings = environment(), read_settings(given.config).model
    checkpoint = load_checkpoint(resolve_model(settings.uri))
    vocab_size = checkpoint.spec.vocab_size
    rows: list[tuple[str, int, Auc]] = []

    def measure(ask: Ask) -> Bench:
        bench = Bench(ask, vocab_size, given.tokens)
        same = bench.measure(given.control_trials, ATTACKER)
        rows.append(
            ("its prompt was asked before by another tenant", given.trials, bench.measure(given.trials, VICTIM))
        )
        rows.append(("its prompt was asked before by the same tenant (control)", given.control_trials, same))
        return bench

    if given.engine:
        config = EngineConfig(lora_pool_rows=0, num_kv_blocks=64)
        measure(EngineTenants(Engine(load_backend(checkpoint, config), config)).ask)
    else:
        del checkpoint  # the service has its own
        with serving(given.config, settings.name, given.adapter) as tenants:
            names = measure(tenants.ask).measure_names(given.trials, tenants.time_refusal)
        rows.append(("it names another tenant's adapter, not an unknown one", given.trials, names))
    lines = [f"| {what} | {num_trials} | {found} |" for what, num_trials, found in rows]
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. Prompts of {given.tokens} tokens.\n\n"
        "| a request is answered sooner when | trials | AUC |\n|---|---:|---:|"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
