"""Adapters on their way into the tables: in the background, in pieces, rounded once, and never read half-written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from app.engine.adapters.adapter import LoraAdapter, LoraKey
from app.engine.adapters.card import AdapterRef
from app.engine.cuda import adapters as gpu_adapters
from app.engine.cuda.adapters import AdapterTables
from app.engine.cuda.lora_tables import Layout
from app.engine.cuda.memory import rank_row_size
from app.engine.engine import Engine
from app.engine.errors import AdapterMismatch, AdapterWriteFailed
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from app.kernels.cast_bf16.cpu import round_rows, tasks_of
from app.kernels.lora_rows import START_MULTIPLE
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cuda.gpu import DEVICE, gpu_backend, gpu_config
from tests.seeds import rng


@contextmanager
def _tables(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Iterator[AdapterTables]:
    tables = AdapterTables(spec, 128, 8, DEVICE, dtype)
    yield tables
    tables.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_bytes", [100, 10_000, 1 << 20])
def test_what_is_written_is_the_adapter_at_its_rows(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_adapters, "_PIECE_BYTES", piece_bytes)
    spec = tiny_spec()
    adapters = {1: (32, random_adapter(spec, 21)), 2: (0, random_adapter(spec, 8, ["k_proj", "down_proj"]))}
    with _tables(spec, dtype) as tables:
        for slot, (row_start, adapter) in adapters.items():
            tables.write(slot, row_start, adapter)
        tables.wait(np.array([0, 1, 2], np.int32))
        assert tables.max_ranks.tolist()[:4] == [0, 21, 8, 0]
        for slot, (row_start, adapter) in adapters.items():
            run = range(row_start * rank_row_size(spec), (row_start + tables.num_rows(adapter)) * rank_row_size(spec))
            for layer in range(len(spec.layers)):
                for module, target in [(p, t) for p in layer_linear_modules(spec, layer) for t in p.targets]:
                    rows = tables.rows(layer)[module.name]
                    where = slot, module.targets.index(target)
                    pair = adapter.weights.get(LoraKey(layer, target))
                    assert rows.ranks[where] == (0 if pair is None else pair.rank)
                    for starts, matrix in zip((rows.a_starts, rows.b_starts), pair or (), strict=False):
                        start = int(starts[where])
                        assert start % START_MULTIPLE == 0
                        assert start in run
                        assert start + matrix.size - 1 in run
                        found = rows.memory[start : start + matrix.size].cpu().view(matrix.shape)
                        assert torch.equal(found, torch.from_numpy(matrix.astype(np.float32)).to(dtype))


def test_rounding_is_to_the_nearest_even() -> None:
    values = rng().normal(0, 1, (5, 37)).astype(np.float32)
    values[0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -(2.0**-130), 3e38]  # two ties, a tiny number, a large one
    buffer = np.zeros((5, 50), np.uint16)
    round_rows(tasks_of([(values, 3)]), 0, 5, 50, buffer.reshape(-1))
    np.testing.assert_array_equal(buffer[:, 3:40], values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert not buffer[:, :3].any()
    assert not buffer[:, 40:].any()


def test_a_step_waits_for_its_own_adapters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec()
    gate = threading.Event()
    write = AdapterTables._write

    def slow(self: AdapterTables, adapter_slot: int, *rest: Any) -> Any:
        assert adapter_slot != 2 or gate.wait(60)
        return write(self, adapter_slot, *rest)

    monkeypatch.setattr(AdapterTables, "_write", slow)
    with _tables(spec) as tables:
        tables.write(1, 0, random_adapter(spec, 8))
        tables.wait(np.array([1], np.int32))
        assert tables.is_ready(1)
        tables.write(2, 16, random_adapter(spec, 8))
        assert not tables.is_ready(2)
        assert tables.is_ready(0)
        tables.wait(np.array([0, 1], np.int32))  # does not wait for 2
        assert int(tables.rows(0)["qkv"].ranks[2].sum()) == 0
        gate.set()
        tables.wait(np.array([2, 2, 0], np.int32))
        assert tables.is_ready(2)
        assert tables.rows(0)["qkv"].ranks[2].tolist() == [8, 8, 8]


def test_a_failed_write_ends_its_own_requests_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before the step, or in it: a step of that adapter alone waits for its write."""
    spec = tiny_spec()
    good, bad = random_adapter(spec, 8), random_adapter(spec, 5)
    send = AdapterTables._send_all
    broken = True

    def send_all(self: AdapterTables, adapter_slot: int, row_start: int, layout: Layout, *rest: Any) -> None:
        if broken and layout is self._layout(bad):
            self._singles.point(adapter_slot, row_start, layout)  # half-written
            raise OSError("the link is down")
        send(self, adapter_slot, row_start, layout, *rest)

    monkeypatch.setattr(AdapterTables, "_send_all", send_all)
    config = gpu_config(max_model_len=64, batch_invariant=True)  # the same bits in any batch
    engine = Engine(gpu_backend(spec, random_tensors(spec), config), config)
    alone = _answers(engine, {"good": good, "base": None})
    for others in ({"good": good, "base": None}, {}):
        chunks = _answers(engine, {"bad": bad, **others})
        error = chunks["bad"][-1].error
        assert isinstance(error, AdapterWriteFailed)
        assert "OSError: the link is down; its next request writes it again" in str(error)
        assert [chunk.token_ids for name in others for chunk in chunks[name]] == [
            chunk.token_ids for name in others for chunk in alone[name]
        ]
        assert engine.failure is None
        assert [resident.digest for resident in engine.stats().residents] == [good.card.digest]
    broken = False
    assert _answers(engine, {"bad": bad})["bad"][-1].finish_reason == "length"


def _answers(engine: Engine, adapters: dict[str, LoraAdapter | None]) -> dict[str, list[TokenChunk]]:
    """The chunks of a greedy request for each."""
    chunks: dict[str, list[TokenChunk]] = {name: [] for name in adapters}
    for name, adapter in adapters.items():
        ref = None if adapter is None else AdapterRef(name, adapter.card.digest, "t")
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(name, "t", (5, 7, 11), sampling, ref), adapter)
    while not all(found and found[-1].finish_reason for found in chunks.values()):
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
        engine.check()
    return chunks


def test_a_module_the_decoder_does_not_have_is_refused() -> None:
    backend = gpu_backend(tiny_spec(), random_tensors(tiny_spec()), gpu_config())
    with pytest.raises(AdapterMismatch, match="in layer 2"):
        backend.write_adapter(1, 0, random_adapter(tiny_spec(num_layers=3), 8))
    backend.close()
