"""llama.cpp behind a pipe, for `bench_engine` and `compute_quality`: it runs in an environment with llama-cpp-python.

Input: one JSON line of settings, then one line per job: prompts (token ids) and the number of tokens to generate, or a
window (token ids). Output: one JSON line each: "ready"; tokens and step times as in `load_tests.decoding.DecodeResult`;
the negative log-likelihoods of a window's tokens but the first. All streams are in each batch, which is what
llama.cpp's server does with its slots.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np


class Context:
    """A GGUF file in llama.cpp, with room for so many streams."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        model_options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        num_streams, length = settings["max_num_seqs"], settings["max_model_len"]
        options.n_ctx, options.n_seq_max = num_streams * length, num_streams
        options.n_batch = options.n_ubatch = max(512, num_streams * length)
        options.n_threads = options.n_threads_batch = settings["num_threads"]
        options.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._num_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)

    def run(self, tokens: Sequence[tuple[int, int, int, bool]]) -> Any:
        """Compute (token, position, stream, whether to give its logits); [N, V] logits of those."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, stream, has_logits) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, stream, has_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        count = sum(has_logits for *_, has_logits in tokens)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (count, self._num_words))

    def clear(self) -> None:
        """Forget all streams."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """Greedy tokens of all streams."""
        self.clear()
        began = now = time.perf_counter()
        rows = [
            (token, position, stream, position == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        chosen = self.run(rows).argmax(axis=1).tolist()
        found, step_s = [[token] for token in chosen], []
        prefill_s = time.perf_counter() - began
        for step in range(num_tokens - 1):
            now = time.perf_counter()
            rows = [(chosen[stream], len(prompt) + step, stream, True) for stream, prompt in enumerate(prompts)]
            chosen = self.run(rows).argmax(axis=1).tolist()
            for row, token in zip(found, chosen, strict=True):
                row.append(token)
            step_s.append(time.perf_counter() - now)
        return {"token_ids": found, "prefill_s": prefill_s, "step_s": step_s}

    def losses(self, window: Sequence[int]) -> dict[str, Any]:
        """Negative log-likelihoods in nats."""
        self.clear()
        logits = self.run([(token, position, 0, True) for position, token in enumerate(window)])[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        likelihoods = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return {"losses": (-likelihoods[np.arange(len(window) - 1), window[1:]]).tolist()}


def main() -> None:
    """Serve jobs from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    context = Context(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = context.losses(job["window"]) if "window" in job else context.decode(job["prompts"], job["num_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
