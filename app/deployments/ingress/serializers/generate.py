"""Response bodies of POST /generate and of the Python handle, and token usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.deployments.ingress.dispatch.generation_task import GenerationTask, PredictionUsage, SequenceOutput
from app.engine.request import Usage


def generate_result(task: GenerationTask, index: int, answer: SequenceOutput) -> dict[str, Any]:
    """One answer of /generate and of the Python handle."""
    adapter = task.requests[index].requested_adapter
    usage = usage_body([answer.usage])
    return {
        "text": answer.text,
        "meta_info": {
            "id": task.requests[index].request_id,
            "lora": adapter.name if adapter is not None else None,
            "lora_generation": adapter.generation if adapter is not None else None,
            "lora_digest": adapter.digest if adapter is not None else None,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        },
    }


def usage_body(
    usages: Sequence[Usage | None], num_per_prompt: int = 1, predictions: Mapping[int, PredictionUsage] | None = None
) -> dict[str, Any]:
    """Token counts in OpenAI's format. Each prompt is counted once, however many answers it has (n).

    `predictions`: accepted and rejected tokens of predicted outputs, by answer.
    """
    known = [usage for usage in usages if usage is not None]
    prompts = known[::num_per_prompt]
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_completion = sum(usage.completion_tokens for usage in known)
    body: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }
    if predictions:
        body["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(each.num_accepted for each in predictions.values()),
            "rejected_prediction_tokens": sum(each.num_rejected for each in predictions.values()),
        }
    return body


def prompt_usage(usages: Sequence[Usage | None]) -> dict[str, int]:
    """Token counts of a request that writes nothing: embeddings, scores."""
    usage = usage_body(usages)
    return {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
