"""llama.cpp as a `Decoder`, from an environment with llama-cpp-python; it reads the base's GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from load_tests.decoding import DecodeResult
from load_tests.engine.vllm_reference import WorkerProcess

WORKER = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCppDecoder:
    """Without adapters. `max_length`: of a stream, prompt included."""

    def __init__(
        self, python: Path, model: Path, log: Path, *, max_streams: int, max_length: int, num_threads: int
    ) -> None:
        settings = {
            "model": str(model),
            "max_num_seqs": max_streams,
            "max_model_len": max_length,
            "num_threads": num_threads,
        }
        self._worker = WorkerProcess(python, WORKER, settings, log)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int | None],  # noqa: ARG002
        num_tokens: int,
    ) -> DecodeResult:
        answer = self._worker.ask({"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens})
        tokens = tuple(tuple(row) for row in answer["token_ids"])
        return DecodeResult(tokens, answer["prefill_s"], tuple(answer["step_s"]))

    def losses(self, window: Sequence[int]) -> list[float]:
        """Negative log-likelihoods of a window's tokens but the first, in nats."""
        found: list[float] = self._worker.ask({"window": list(window)})["losses"]
        return found

    def close(self) -> None:
        """End the process."""
        self._worker.close()
