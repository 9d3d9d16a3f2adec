"""The engine in this process: no Ray, no HTTP.

python examples/in_process.py MODEL ADAPTER
"""

from __future__ import annotations

import sys

from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.request import SamplingParams


def main(model: str, adapter: str) -> None:
    """`model` is a path or a source URI, `adapter` the path of a PEFT folder or an Arrow card."""
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(model, EngineConfig(num_kv_blocks=256)) as llm:
        prompt = llm.chat_prompt("How many users are there?")
        base, adapted = llm.generate([prompt, prompt], [None, adapter], greedy)
        print("base:", base.text)
        print("adapter:", adapted.text, f"({adapted.usage.completion_tokens} tokens, {adapted.finish_reason})")
        print("stream:", "".join(llm.stream(prompt, adapter, greedy)))
        (vector,) = llm.embed(["How many users are there?"])
        print("embedding:", len(vector), "numbers")
        print("freed rows:", llm.remove_adapter(adapter))


if __name__ == "__main__":
    main(*sys.argv[1:3])
