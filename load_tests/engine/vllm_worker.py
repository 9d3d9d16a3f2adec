"""vLLM behind a pipe, for `vllm_reference`: it runs in vLLM's own environment and imports nothing of ours.

Input: one JSON line of settings, then one line per job: prompts (token ids), a LoRA folder per prompt or null, the
number of tokens, a JSON schema for all answers or null. Output: one JSON line each: "ready", then tokens and step times
as in `load_tests.decoding.DecodeResult`. The engine runs in this process and is stepped by hand, so that its steps are
timed like ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve jobs from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to standard error
    settings = json.loads(sys.stdin.readline())
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        _limit_to_avx2()
    from vllm import LLM

    lora = {
        "enable_lora": True,
        "max_loras": settings["max_loras"],
        "max_cpu_loras": settings["max_loras"],
        "max_lora_rank": settings["max_lora_rank"],
    }
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        skip_tokenizer_init=not settings["has_tokenizer"],
        enforce_eager=not settings["compiled"],
        seed=0,
        **({"structured_outputs_config": {"backend": "guidance"}} if settings["has_tokenizer"] else {}),
        **(lora if settings["max_loras"] else {}),
    )
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        _answer(answers, _decode(llm.llm_engine, json.loads(line)))


def _limit_to_avx2() -> None:
    """vLLM asks the processor which of its kernels to take, and Inductor for how wide to make its own."""
    import torch
    import torch._inductor.config

    torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
    torch._inductor.config.cpp.simdlen = 256


def _answer(answers: Any, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document) + "\n")
    answers.flush()


def _decode(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    folders = sorted({folder for folder in job["loras"] if folder})
    sampling = SamplingParams(max_tokens=job["num_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    if job["schema"] is not None:
        from vllm.sampling_params import StructuredOutputsParams

        sampling.structured_outputs = StructuredOutputsParams(json=job["schema"])
    started = time.perf_counter()
    for i, (prompt, folder) in enumerate(zip(job["prompts"], job["loras"], strict=True)):
        number = folders.index(folder) + 1 if folder else 0
        lora = LoRARequest(f"adapter-{number}", number, folder) if folder else None
        engine.add_request(f"{started}-{i}", {"prompt_token_ids": prompt}, sampling, lora_request=lora)
    tokens: dict[str, list[int]] = {}
    opened, any_ended, step_s = 0.0, False, []
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not opened:
            opened = now if len(tokens) == len(job["prompts"]) else 0.0
        elif not any_ended:
            step_s.append(now - before)
        any_ended = any_ended or any(output.finished for output in outputs)
    ordered = [tokens[f"{started}-{i}"] for i in range(len(job["prompts"]))]
    return {"token_ids": ordered, "prefill_s": opened - started, "step_s": step_s}


if __name__ == "__main__":
    main()
