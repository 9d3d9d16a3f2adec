"""Answers in token ids, for trainers: the tokens that the engine drew, and which adapter drew them.

In: a job of /v1/completions whose client asks for token ids. Out: the same job with what its answers need, and the
fields that they have beside the others. Rule: `token_ids` has every token that was drawn, the one that ended the answer
among them, and log-probabilities have an entry for each; an id is never one of text that was tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.schemas.openai import CompletionRequest
from app.engine.adapters.card import AdapterRef
from app.engine.request import TokenLogprobs


class NoText:
    """The `Decoder` of an answer without text."""

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class TokenIdOutput(NamedTuple):
    """Fields of the answers of one job. `has_text`: there is text beside the ids."""

    job: GenerationTask
    has_text: bool

    @property
    def adapter(self) -> dict[str, Any]:
        """Which contents have drawn all tokens of the job; null is the base model."""
        return {"adapter": adapter_body(self.job.requests[0].requested_adapter)}

    def choice(self, index: int, token_ids: Sequence[int], *, is_first: bool) -> dict[str, Any]:
        """Fields of a choice, or of a piece of one; its first has the prompt, too."""
        prompt = {"prompt_token_ids": self.job.requests[index].token_ids} if is_first else {}
        return {**prompt, "token_ids": token_ids}


def in_token_ids(job: GenerationTask, body: CompletionRequest) -> GenerationTask:
    """The job as its client wants the answers: in token ids, with text or without, or in text alone."""
    if not body.wants_token_ids:
        return job
    return replace(job, keeps_end=True, new_decoder=job.new_decoder if body.detokenize else NoText)


def token_id_outputs(job: GenerationTask, *, has_text: bool) -> TokenIdOutput | None:
    """The fields of its answers; None where they are of text alone."""
    return TokenIdOutput(job, has_text) if job.keeps_end else None


def adapter_body(ref: AdapterRef | None) -> dict[str, Any] | None:
    """What a name meant when the request came: it goes on meaning that for the whole answer."""
    return None if ref is None else {"name": ref.name, "generation": ref.generation, "digest": ref.digest}


def lean_logprobs(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities by token ids; the likeliest ones are named as vLLM names tokens, where some are asked for."""
    told: dict[str, Any] = {"token_logprobs": [finite(item.logprob) for item in logprobs]}
    if any(item.top for item in logprobs):
        told["top_logprobs"] = [
            {f"token_id:{token_id}": finite(logprob) for token_id, logprob in item.top} for item in logprobs
        ]
    return told


def finite(logprob: float) -> float:
    """JSON has no infinity and no NaN: OpenAI writes -9999 for a token of probability 0."""
    return max(-9999.0, logprob)  # in this order: of a NaN the first is taken
