"""A backend's logits against transformers, through block tables: whole prompts together, and one in chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.backend import Backend
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.request import SamplingParams, TokenLogprobs
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.checkpoints import save, tiny_model
from tests.engine.driving import run
from tests.fakes import fake_request
from tests.seeds import rng

NUM_BLOCKS = 64
TOLERANCE = 1e-4
#: Some float32 roundings, as a fraction of a weight.
ROUNDING = 2.0**-20


class BackendWithLogits(Backend, Protocol):
    """What the backends show to tests: the last step's logits."""

    def logits(self, num_rows: int) -> NDArray[np.float32]: ...


def check_family(
    family: str,
    folder: Path,
    make_backend: Callable[[Checkpoint], BackendWithLogits],
    lengths: tuple[int, int, int],
    chunk_end: Callable[[np.random.Generator, int], int],
) -> None:
    """A tiny random model of this family, prompts of these lengths; the last one again in chunks.

    `chunk_end` says where the chunk that begins at a position ends.
    """
    model = tiny_model(family)
    backend = make_backend(load_checkpoint(save(model, folder / "model")))
    block_size = backend.limits.block_size
    generator = rng()
    prompts = steady_prompts(model, generator, lengths)
    tables = generator.permutation(NUM_BLOCKS)[:15].reshape(3, 5)
    with torch.no_grad():
        expected = [model(torch.tensor(p[None])).logits[0].numpy() for p in prompts]

    whole = forward_batch([Piece(p, 0, t) for p, t in zip(prompts, tables, strict=True)], block_size)
    output = backend.forward(whole)
    last = np.stack([e[-1] for e in expected])
    assert np.abs(backend.logits(3) - last).max() <= TOLERANCE
    assert output.token_ids.tolist() == backend.logits(3).argmax(1).tolist()

    fresh = generator.permutation(NUM_BLOCKS)[:5]
    at = 0
    while at < lengths[2]:
        end = chunk_end(generator, at)
        backend.forward(forward_batch([Piece(prompts[2][at:end], at, fresh)], block_size))
        assert np.abs(backend.logits(1)[0] - expected[2][end - 1]).max() <= TOLERANCE
        at = end


def check_prompt_logprobs(
    family: str, folder: Path, make_backend: Callable[[Checkpoint], Backend], max_num_batched_tokens: int = 24
) -> None:
    """Log-probabilities of prompts, computed in chunks beside each other, twice, against transformers."""
    model = tiny_model(family)
    backend = make_backend(load_checkpoint(save(model, folder / "model")))
    engine = Engine(backend, EngineConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8))
    generator = rng()
    prompts = steady_prompts(model, generator, (2, 37, 70))
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=3)
    for attempt in range(2):  # the second time the prompts are in the cache
        for index, prompt in enumerate(prompts):
            engine.submit(fake_request(f"{attempt} {index}", prompt.tolist(), sampling=sampling))
        for chunks in run(engine).values():
            (chunk,) = chunks
            assert (chunk.token_ids, chunk.finish_reason) == ((), "length")
            assert_logprobs(model, prompts[int(chunk.request_id[-1])], chunk.prompt_logprobs)


def steady_prompts(
    model: torch.nn.Module, generator: np.random.Generator, lengths: Sequence[int], prefix: Sequence[int] = ()
) -> list[NDArray[np.int64]]:
    """`prefix` and random tokens, so many, for each length: prompts whose logits hardly depend on how the weights are
    rounded.

    Where two experts suit a token equally well, rounding decides between them, and two right programs may differ.
    """
    changed, weights = copy.deepcopy(model), list(model.parameters())

    def logits(of: Any, prompt: NDArray[np.int64]) -> torch.Tensor:
        found: torch.Tensor = of(torch.tensor(prompt[None])).logits
        return found

    def is_steady(prompt: NDArray[np.int64]) -> bool:
        exact = logits(model, prompt)
        for _ in range(20):
            for weight, value in zip(changed.parameters(), weights, strict=True):
                weight.copy_(value * (1 + ROUNDING * torch.randn_like(value)))
            if (logits(changed, prompt) - exact).abs().max() > 10 * TOLERANCE:
                return False
        return True

    prompts: list[NDArray[np.int64]] = []
    with torch.no_grad():
        for length in lengths:
            while not is_steady(prompt := np.append(np.array(prefix, np.int64), generator.integers(3, 99, length))):
                pass
            prompts.append(prompt)
    return prompts


def assert_logprobs(model: Any, prompt: NDArray[np.int64], found: Sequence[TokenLogprobs]) -> None:
    """`found` is what transformers' logits give for the tokens of the prompt but the first."""
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor(prompt[None])).logits[0].double(), -1).numpy()
    assert [item.token_id for item in found] == prompt[1:].tolist()
    for row, item in zip(expected, found, strict=False):
        assert abs(item.logprob - row[item.token_id]) <= TOLERANCE
        near = np.abs(row - row[item.token_id]) <= 2 * TOLERANCE
        assert abs(item.rank - 1 - (row > row[item.token_id]).sum()) < max(near.sum(), 1)
        assert len(item.top) == 3
        assert np.abs(np.sort(row)[::-1][:3] - [logprob for _, logprob in item.top]).max() <= TOLERANCE
