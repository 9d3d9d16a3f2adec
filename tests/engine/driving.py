"""An engine over the fake backend, stepped by hand, and what its answers must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import GenerateRequest, RequestUsage, TokenChunk
from tests.fakes import EOS, FakeBackend, fake_adapter, fake_prompt_logprobs, fake_tokens

Submitted = tuple[GenerateRequest, LoraAdapter | None]

ADAPTERS = [fake_adapter(f"a{i}", rank) for i, rank in enumerate((1, 8, 9, 16, 30, 32, 8, 16))]
#: Two that are activated by tokens that random prompts have.
ADAPTERS += [fake_adapter("b0", 8, invocation=(11,)), fake_adapter("b1", 16, invocation=(11, 12))]


def make_engine(
    *,
    num_kv_blocks: int = 64,
    block_size: int = 8,
    rows: int = 64,
    alignment: int = 8,
    max_loras: int = 8,
    num_draft_rows: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
    **config: int | bool | str,
) -> tuple[Engine, FakeBackend]:
    """`clock` stands still, so that what the machine does changes no schedule."""
    limits = BackendLimits(
        num_kv_blocks, block_size, rows, alignment, max_loras, can_embed=True, num_draft_rows=num_draft_rows
    )
    backend = FakeBackend(limits)
    return Engine(backend, EngineConfig.model_validate(config), clock), backend


def run(engine: Engine, max_steps: int = 20_000) -> dict[str, list[TokenChunk]]:
    """Step until idle; chunks by request."""
    out: dict[str, list[TokenChunk]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return out
        collect(out, engine.step())
        engine.check()
    raise AssertionError(f"still busy after {max_steps} steps: {engine.stats()}")


def collect(out: dict[str, list[TokenChunk]], chunks: Iterable[TokenChunk]) -> None:
    for chunk in chunks:
        assert chunk.request_id not in out or out[chunk.request_id][-1].finish_reason is None, "a chunk after the last"
        out.setdefault(chunk.request_id, []).append(chunk)


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def assert_as_alone(submitted: Submitted, chunks: list[TokenChunk]) -> None:
    """The answer is the one the definition gives, with the right end."""
    request, adapter = submitted
    expected = fake_tokens(request, adapter)
    assert tokens_of(chunks) == [line.token_id for line in expected]
    if request.sampling.num_logprobs is not None:
        assert [line for chunk in chunks for line in chunk.logprobs] == expected
    if request.sampling.prompt_logprobs is not None and not request.resume_token_ids:
        first, *others = chunks
        assert list(first.prompt_logprobs) == fake_prompt_logprobs(request, adapter)
        assert not any(chunk.prompt_logprobs for chunk in others)
    last = chunks[-1]
    everything = [*request.resume_token_ids, *tokens_of(chunks)]
    stops = {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else (EOS,))}
    if everything and everything[-1] in stops:
        assert (last.finish_reason, last.matched_stop) == ("stop", everything[-1])
    else:
        assert (last.finish_reason, last.matched_stop) == ("length", None)
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(request.token_ids)
    assert last.usage.completion_tokens == len(everything)
    assert 0 <= last.usage.cached_tokens < len(request.token_ids) + len(request.resume_token_ids)


def assert_empty(engine: Engine) -> None:
    """Nothing is held when nothing runs."""
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_blocks_free == stats.num_blocks
    assert all(resident.num_refs == 0 for resident in stats.residents)


def assert_told(engine: Engine, out: dict[str, list[TokenChunk]]) -> None:
    """The reported usage of all requests is what the engine has computed and written for them."""
    stats, usages = engine.stats(), [chunks[-1].request_usage for chunks in out.values()]
    assert None not in usages
    sums = RequestUsage(*map(sum, zip(*filter(None, usages), strict=True))) if usages else RequestUsage()
    assert sums == RequestUsage(
        stats.num_prompt_tokens,
        stats.num_cached_tokens,
        stats.num_tokens_generated,
        stats.num_adapter_writes,
        stats.num_adapter_write_bytes,
        stats.rank_row_ms,
        stats.kv_block_ms,
    )
