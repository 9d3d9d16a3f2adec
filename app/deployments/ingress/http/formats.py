"""The envelope of a completion's answer, from its request.

In: a request's body and its job. Out: its `ChatSerializer`. Rule: nothing is decided here.
"""

from __future__ import annotations

from app.deployments.ingress.job import Job
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.serializers.openai import ChatSerializer
from app.deployments.ingress.text_model import TextModel
from app.deployments.ingress.token_answers import token_answers


def answer_format(model: TextModel, body: ChatCompletionRequest | CompletionRequest, job: Job) -> ChatSerializer:
    """Of one request's answers."""
    is_chat = isinstance(body, ChatCompletionRequest)
    return ChatSerializer(
        is_chat=is_chat,
        request_id=job.request_id,
        created=int(job.requests[0].arrival_s),
        model=body.model,
        token_text=model.token_text,
        token_bytes=model.token_bytes,
        text_bytes=model.text_bytes,
        want_logprobs=body.logprobs if isinstance(body, ChatCompletionRequest) else body.logprobs is not None,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tools=job.tools,
        foretold=job.progress.foretold,
        routing=None if job.decision is None else job.decision.body(),
        ids=token_answers(job, has_text=not isinstance(body, CompletionRequest) or body.detokenize),
    )
