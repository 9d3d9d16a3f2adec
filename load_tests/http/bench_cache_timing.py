"""Whether the time to a first token tells that another tenant has asked the same.

In: a base model. Out: Markdown on stdout: the AUC (the chance that a prompt which somebody has asked before is answered
sooner than one that nobody has, ties counted half) over trials in which another tenant asked it before, and, as a
control that the measurement can tell at all, in which the same tenant did. 0.5 tells nothing. The engine alone, without
threads, Ray or HTTP, which would only add noise to what an attacker sees. Prompts are new in each trial; which of the
two cases it is is drawn, and in both the engine computes one prompt before the one that is timed.

    python -m load_tests.http.bench_cache_timing --trials 2000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.sources import DEFAULT_MODEL_URI, resolve_model
from app.engine.open import load_backend
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.measuring import environment

#: Tenants and their salts, which the service derives from their secrets.
ATTACKER, VICTIM = ("attacker", b"a" * 32), ("victim", b"v" * 32)
#: Trials that are not counted: the first steps of an engine are slower.
_NUM_WARM_UP = 10


def auc(sooner: Sequence[float], others: Sequence[float]) -> float:
    """The chance that one of the first is smaller than one of the others, ties counted half. Raises ValueError for
    none of either."""
    if not sooner or not others:
        raise ValueError("an AUC compares values of two kinds; there are none of one")
    ordered: NDArray[np.float64] = np.sort(np.asarray(others, np.float64))
    values = np.asarray(sooner, np.float64)
    larger = len(ordered) - np.searchsorted(ordered, values, side="right")
    equal = np.searchsorted(ordered, values, side="right") - np.searchsorted(ordered, values, side="left")
    return float((larger + 0.5 * equal).mean() / len(ordered))


class Bench:
    """An engine, and prompts of `num_tokens` that nobody has asked. `clock` gives seconds."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        num_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._vocab_size, self._num_tokens = vocab_size, num_tokens
        self._rng = np.random.default_rng(seed)
        self._num_requests = 0

    def measure(self, num_trials: int, before: tuple[str, bytes]) -> float:
        """The AUC of the attacker's times where `before` has asked the same prompt, against where it asked another."""
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-_NUM_WARM_UP, num_trials):
            is_same = bool(self._rng.random() < 0.5)
            prompt = self._prompt()
            self._ask(before, prompt if is_same else self._prompt())
            time_s = self._ask(ATTACKER, prompt)
            if number >= 0:
                times_s[is_same].append(time_s)
        return auc(times_s[True], times_s[False])

    def _prompt(self) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, self._vocab_size, self._num_tokens).tolist())

    def _ask(self, who: tuple[str, bytes], prompt: tuple[int, ...]) -> float:
        """Seconds to the first token, which is the only one."""
        self._num_requests += 1
        tenant_id, salt = who
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerateRequest(f"r{self._num_requests}", tenant_id, prompt, sampling, cache_salt=salt)
        started_s = self._clock()
        self._engine.submit(request)
        while not any(chunk.request_id == request.request_id for chunk in self._engine.step()):
            pass
        return self._clock() - started_s


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="AUC of telling another tenant's prompts by the time they take.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--control-trials", type=int, default=200, help="in which the same tenant asked before")
    parser.add_argument("--tokens", type=int, default=33, help="of each prompt")
    given = parser.parse_args()
    machine = environment()
    checkpoint = load_checkpoint(resolve_model(given.model))
    config = EngineConfig(adapter_rank_rows=0, num_kv_blocks=64)
    engine = Engine(load_backend(checkpoint, config), config)
    bench = Bench(engine, checkpoint.spec.vocab_size, given.tokens)
    control = bench.measure(given.control_trials, ATTACKER)
    attack = bench.measure(given.trials, VICTIM)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. Prompts of {given.tokens} tokens.\n\n"
        "| the prompt was asked before by | trials | AUC |\n|---|---:|---:|\n"
        f"| another tenant | {given.trials} | {attack:.3f} |\n"
        f"| the same tenant (control) | {given.control_trials} | {control:.3f} |"
    )


if __name__ == "__main__":
    main()
