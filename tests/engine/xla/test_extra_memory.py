"""What is kept in an adapter's memory is there whatever comes and goes beside it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from app.engine.adapters.lora import LoraAdapter, TokenRows
from app.engine.config import EngineConfig, XlaConfig
from app.engine.errors import AdapterTooLarge, ConfigError
from app.engine.xla.extra_memory import _PIECE, ExtraMemory
from app.engine.xla.extra_runs import ExtraRuns
from app.engine.xla.sharding import make_mesh
from app.kernels.extras.xla import HEAD_ROWS
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.making import random_adapter, tiny_spec
from tests.engine.xla.making import tiny_backend


def test_arrays_stay_what_they_are_while_others_come_and_go() -> None:
    generator = np.random.default_rng()
    num_floats = 5 * _PIECE
    memory = ExtraMemory(4 * num_floats, 0, make_mesh(jax.devices("cpu"), 1))
    held: dict[int, list[tuple[int, np.ndarray]]] = {}
    for step in range(150):
        adapter_slot = int(generator.integers(1, 9))
        if adapter_slot in held:
            memory.release(adapter_slot)
            del held[adapter_slot]
            continue
        # Sizes from one float to more than a piece, some of them in several arrays, and one that fills what is left.
        taken = sum(array.shape[1] for arrays in held.values() for _, array in arrays)
        size = int(generator.choice([1, 7, 3000, _PIECE, _PIECE + 5, 2 * _PIECE, num_floats - taken]))
        cuts = sorted(generator.integers(0, size + 1, 3).tolist())
        sizes = np.diff([0, *cuts, size]).tolist()
        arrays = [generator.normal(size=(1, n)).astype(np.float32) for n in sizes if n]
        if not arrays:
            continue
        if taken + size > num_floats:
            with pytest.raises(AdapterTooLarge, match=rf"needs {4 * size} bytes.*adapter_extra_bytes"):
                memory.write(adapter_slot, arrays)
            continue
        places, moves = memory.write(adapter_slot, arrays)
        for move in moves:
            held[move.adapter_slot] = [
                (place - move.source + move.target, array) for place, array in held[move.adapter_slot]
            ]
        held[adapter_slot] = list(zip(places, arrays, strict=True))
        found = np.asarray(memory.array)
        assert found[0] == 0
        for slot, parts in held.items():
            for place, array in parts:
                assert place > 0
                np.testing.assert_array_equal(found[place : place + array.shape[1]], array[0], err_msg=f"{step} {slot}")


def test_free_floats_that_lie_scattered_are_put_together() -> None:
    runs = ExtraRuns(10)
    assert [runs.take(slot, 3) for slot in (1, 2, 3)] == [(1, []), (4, []), (7, [])]
    runs.release(2)
    assert runs.take(4, 4) == (7, [(3, 7, 4, 3)])
    with pytest.raises(AdapterTooLarge, match="needs 4 bytes beside its rank rows but 40 of 40 are taken"):
        runs.take(5, 1)


def test_an_adapter_that_was_moved_gives_the_same_bits() -> None:
    generator, spec = np.random.default_rng(), tiny_spec()
    hidden = spec.hidden_size

    def own_rows(name: str, count: int) -> LoraAdapter:
        ids = tuple(generator.permutation(spec.vocab_size)[:count].tolist())
        rows = {name: TokenRows(ids, generator.normal(size=(count, hidden)).astype(np.float32))}
        norm = {"model.layers.1.input_layernorm.weight": generator.normal(size=hidden).astype(np.float32)}
        return dataclasses.replace(random_adapter(spec, 3, ["q_proj"]), token_rows=rows, replaced=norm)

    def logits(adapter_slot: int) -> np.ndarray:
        pieces = [Piece(np.arange(40), 0, np.arange(3), adapter_slot), Piece(np.arange(3), 0, np.arange(3, 6), 0)]
        backend.forward(forward_batch(pieces, 16))
        return backend.logits(2)

    config = EngineConfig(
        num_kv_blocks=8, adapter_rank_rows=32, max_batch_tokens=64, max_batch_sequences=8,
        xla=XlaConfig(form="xla", skip_precompile=True), adapter_extra_bytes=4 * (23 * hidden + 9),
    )  # fmt: skip
    backend = tiny_backend(config, spec)
    adapters = [own_rows("embed_tokens", 5), own_rows("lm_head", 9), own_rows("embed_tokens", 6)]
    for slot, adapter in enumerate(adapters, start=1):
        backend.write_adapter(slot, 8 * slot, adapter)
    before = [logits(slot) for slot in range(4)]
    for slot in (1, 3):
        backend.release_adapter(slot)
    place = backend._adapters.tables(backend._rows).own.slots[2, HEAD_ROWS]
    large = own_rows("lm_head", 8)  # fits only where the other two were, together
    backend.write_adapter(1, 8, large)
    assert backend._adapters.tables(backend._rows).own.slots[2, HEAD_ROWS] < place
    np.testing.assert_array_equal(logits(2), before[2])
    np.testing.assert_array_equal(logits(0), before[0])
    found = logits(1)
    backend.release_adapter(2)
    backend.write_adapter(2, 16, large)
    np.testing.assert_array_equal(logits(2), found)
    assert len({array.tobytes() for array in (*before, found)}) == 5


def test_more_memory_than_indices_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter_extra_bytes is 8589934592 .* lower it"):
        ExtraMemory(1 << 33, 0, make_mesh(jax.devices("cpu"), 1))
