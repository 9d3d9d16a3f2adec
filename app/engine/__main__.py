"""One-off generation on the command line, without Ray: `python -m app.engine --model … --prompt …`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from app.engine.api import LLM, Prompt
from app.engine.config import CpuConfig, EngineConfig
from app.engine.errors import PolyloraError
from app.engine.models.download.model_download import DEFAULT_MODEL_URI
from app.engine.request import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 after a message on stderr."""
    options = _parser().parse_args(arguments)
    try:
        _generate(options)
    except PolyloraError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _generate(options: argparse.Namespace) -> None:
    sampling = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    adapters = [None if path == "base" else path for path in options.adapter or ["base"]]
    started = time.perf_counter()
    print("[loading the model; the first start on a machine also compiles kernels: about a minute]", file=sys.stderr)
    with LLM(
        options.model, EngineConfig(cpu=CpuConfig(num_threads=options.num_threads)), progress=_show_progress
    ) as llm:
        loaded = time.perf_counter()
        prompts: list[Prompt] = [
            text if options.raw else llm.chat_prompt(text, system=options.system) for text in options.prompt
        ]
        pairs = [(prompt, adapter) for prompt in prompts for adapter in adapters]
        if len(pairs) == 1:
            for piece in llm.stream(*pairs[0], sampling):
                print(piece, end="", flush=True)
            print()
        else:
            answers = llm.generate([p for p, _ in pairs], [a for _, a in pairs], sampling)
            labels = [(text, adapter) for text in options.prompt for adapter in adapters]
            for (text, adapter), answer in zip(labels, answers, strict=True):
                print(f"--- {adapter or 'base'}: {text}\n{answer.text}")
        seconds, stats = time.perf_counter() - loaded, llm.stats()
        print(
            f"[loaded in {loaded - started:.1f} s; {stats.num_prompt_tokens} prompt and "
            f"{stats.num_tokens_generated} generated tokens in {seconds:.1f} s]",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.engine", description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model (default: %(default)s)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        metavar="PATH",
        help="a PEFT folder or .lora.arrow card, or 'base'; repeat to compare answers in one batch",
    )
    parser.add_argument("--prompt", action="append", required=True, help="a user message; may be repeated")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, default=0, help="0 takes every core")
    return parser


def _show_progress(what: str, done: int, total: int | None) -> None:
    size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB"
    print(f"\r{what}: {size}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
