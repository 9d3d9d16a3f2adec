"""Commands to a worker that has ended are answered, whenever they are given."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from app.engine.config import EngineConfig, VllmConfig
from app.engine.errors import AdapterWriteFailed
from app.engine.models.checkpoint import load_checkpoint
from app.engine.vllm.adapter_slots import AdapterSlots
from app.engine.vllm.worker_process import WorkerProcess
from tests.engine.running import make_adapter, vllm_section, write_model


class EndedProcess:
    """A worker that has ended: frames to it are lost."""

    def send(self, frame: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def slots(tmp_path: Path) -> AdapterSlots:
    spec = load_checkpoint(write_model(tmp_path)).spec
    section = EngineConfig.model_validate({"vllm": vllm_section("fake")}).section(VllmConfig)
    ready = {"num_kv_blocks": 8, "block_size": 16}
    return AdapterSlots(spec, section, ready, cast("WorkerProcess", EndedProcess()), lambda: None)


def test_a_command_given_after_the_workers_end_fails_and_close_returns(slots: AdapterSlots) -> None:
    slots.fail()
    adapter = make_adapter(slots.spec, 1)
    slots.write_adapter(1, 0, adapter)
    closing = threading.Thread(target=slots.close, daemon=True)
    loading = slots.loading(adapter.card.digest)
    assert loading is not None
    with pytest.raises(AdapterWriteFailed, match="vLLM has ended"):
        loading.result(30)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert slots.num_calls == 0
