"""POST /generate: one call, several prompts, each with its own adapter or none.

python examples/generate.py http://127.0.0.1:8000 sql
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx


async def generate(client: httpx.AsyncClient, texts: list[str], adapters: list[str | None]) -> list[dict[str, Any]]:
    """One result per text, in their order. Raises httpx.HTTPStatusError with the service's message."""
    body = {"text": texts, "lora_path": adapters, "sampling_params": {"max_new_tokens": 32, "temperature": 0}}
    response = await client.post("/generate", json=body)
    if response.is_error:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    results: list[dict[str, Any]] = response.json()
    return results


async def main(url: str, adapter: str) -> None:
    text = "How many customers live in Oslo?"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for result in await generate(client, [text, text], [None, adapter]):
            info = result["meta_info"]
            print(info["lora"] or "base", f"({info['completion_tokens']} tokens):", result["text"])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
