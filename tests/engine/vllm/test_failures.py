"""What goes wrong in the worker: each request is answered, the failure is typed, and nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.config import EngineConfig
from app.engine.errors import (
    AdapterWriteFailed,
    ConfigError,
    EngineFailure,
    InvalidRequest,
    NotReady,
    OutOfDeviceMemory,
    UnsupportedField,
)
from app.engine.factory import create_engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.tokenizers.tokenizer import NewToken
from app.engine.structured_output.grammar_builder import regex_grammar
from app.engine.vllm.engine import VllmEngineThread, worker_arguments
from app.engine.vllm.lora_folder import LoraFolders
from app.engine.vllm.worker_process import WorkerProcess
from tests.engine.running import (
    FAKE_WORKER,
    MAX_NUM_SEQS,
    Served,
    engine_config,
    make_adapter,
    ref_of,
    vllm_section,
    write_model,
)

PROMPT = (5, 6, 7, 8)
BAD = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def worker_pid(served: Served) -> int:
    assert isinstance(served.engine, VllmEngineThread)
    return served.engine._vllm.process._process.pid


def assert_all_failed(served: Served, names: list[str]) -> None:
    """Every request ends with the engine's failure, which was reported once; later ones are refused."""
    for name in names:
        assert served.last(name).error is served.engine.failure
    assert served.failures == [served.engine.failure]
    with pytest.raises(EngineFailure):
        served.submit(PROMPT)
    assert served.engine.stop(60)
    with pytest.raises(ProcessLookupError):
        os.kill(worker_pid(served), 0)


def long_requests(served: Served, **options: Any) -> list[str]:
    adapter = make_adapter(served.spec, 1)
    names = [served.submit(PROMPT, adapter, max_tokens=200, **options) for _ in range(MAX_NUM_SEQS + 2)]
    served.wait(lambda: any(name in served.chunks for name in names))
    return names


def test_a_killed_worker_ends_its_requests(folder: Path) -> None:
    served = Served("fake", folder, step_s=0.05)
    names = long_requests(served)
    os.kill(worker_pid(served), signal.SIGKILL)
    assert_all_failed(served, names)
    assert "ended by signal 9" in str(served.engine.failure)


def test_a_worker_that_stops_is_ended_and_its_requests_answered(folder: Path) -> None:
    served = Served("fake", folder, step_s=0.05)
    names = long_requests(served)
    assert not served.engine.check_progress(1000)
    os.kill(worker_pid(served), signal.SIGSTOP)
    deadline_s = time.monotonic() + 60
    while not served.engine.check_progress(0.3):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    failure = served.engine.failure
    assert failure is not None
    assert "it hangs" in str(failure)
    assert failure.computing <= set(names)
    assert failure.computing
    assert not served.engine.check_progress(0.3), "found once"
    assert_all_failed(served, names)


def test_a_worker_that_reads_nothing_is_closed(folder: Path) -> None:
    """Its socket is full, so a frame more would wait for ever."""
    checkpoint, config = load_checkpoint(folder), engine_config("fake")
    command = [sys.executable, str(FAKE_WORKER)]
    process = WorkerProcess(command, worker_arguments(checkpoint, config), {}, lambda _: None, lambda _: None)
    process.wait_ready()
    os.kill(process._process.pid, signal.SIGSTOP)
    sending = threading.Thread(target=process.send, args=({"type": "abort", "ids": ["x" * (1 << 23)]},), daemon=True)
    closing = threading.Thread(target=process.close, daemon=True)
    for thread in (sending, closing):
        thread.start()
    for thread in (closing, sending):
        thread.join(30)
        assert not thread.is_alive()


def test_a_failure_names_the_requests_that_may_have_caused_it(folder: Path) -> None:
    served = Served("fake", folder, crash_on_token=BAD)
    name = served.submit((BAD,))
    served.last(name)
    failure = served.engine.failure
    assert failure is not None
    assert failure.computing == {name}
    assert "the fake device is on fire" in str(failure)
    assert_all_failed(served, [name])


def test_an_answer_that_is_no_frame_is_a_failure(folder: Path) -> None:
    served = Served("fake", folder, garbage_on_token=BAD)
    assert_all_failed(served, [served.submit((BAD,))])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")
def test_shared_memory_of_a_worker_that_is_ended_is_removed(folder: Path) -> None:
    served = Served("fake", folder, garbage_on_token=BAD, shared_memory=True)
    memory = Path(f"/dev/shm/polylora-test-{worker_pid(served)}")
    assert memory.exists()
    assert_all_failed(served, [served.submit((BAD,))])
    deadline_s = time.monotonic() + 60
    while memory.exists():
        assert time.monotonic() < deadline_s, "Python's resource tracker removes it"
        time.sleep(0.05)


def test_a_grammar_of_tools_is_taken(folder: Path) -> None:
    served = Served("fake", folder)
    schema = '%json {"type": "object"}'
    assert len(served.answer(PROMPT, grammar=f"start: TEXT | {schema}\nTEXT: /a+/", ignore_eos=False)) > 0
    assert served.engine.stop(60)


def test_a_refused_request_ends_alone(folder: Path) -> None:
    served = Served("fake", folder, refuse_on_token=BAD)
    error = served.last(served.submit((BAD,))).error
    assert isinstance(error, InvalidRequest)
    assert "no such thing" in str(error)
    assert len(served.answer(PROMPT)) == 8
    assert served.engine.stop(60)


def test_an_adapter_that_does_not_load_ends_its_own_requests(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    config = EngineConfig.model_validate({"vllm": vllm_section("fake", fail_loads=True)})
    ended: list[Any] = []
    engine = create_engine(checkpoint, config, ended.extend)
    engine.start()
    adapter = make_adapter(checkpoint.spec, 1)
    with pytest.raises(AdapterWriteFailed, match="does not like it"):
        engine.load_adapter(adapter, ref_of(adapter)).result(60)
    deadline_s = time.monotonic() + 60
    while engine.stats().residents and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert engine.stats().residents == ()
    assert engine.stop(60)


def test_what_vllm_says_is_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        assert Served("fake", folder).engine.stop(60)
    assert ("vllm", logging.WARNING, "WARNING 11-26 [fake.py:1] the fake says something") in caplog.record_tuples


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "/no/such/python"}, "cannot be run"),
        ({"worker": "/no/such/worker.py"}, "ended with status"),
        ({"extra_args": {"fake": {"start_error": "TypeError: no field 'x'"}}}, "no field 'x'"),
    ],
)
def test_a_worker_that_does_not_start_is_a_configuration_error(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    config = EngineConfig.model_validate({"vllm": {**vllm_section("fake"), **changes}})
    with pytest.raises(ConfigError, match=message):
        create_engine(load_checkpoint(folder), config, list)


def test_memory_that_does_not_suffice_has_its_own_error(folder: Path) -> None:
    section = vllm_section("fake", start_error="RuntimeError: CUDA out of memory")
    with pytest.raises(OutOfDeviceMemory):
        create_engine(load_checkpoint(folder), EngineConfig.model_validate({"vllm": section}), list)


def test_what_vllm_would_change_is_refused(folder: Path) -> None:
    served = Served("fake", folder)
    with pytest.raises(UnsupportedField, match="temperature"):
        served.submit(PROMPT, temperature=0.005)
    with pytest.raises(NotReady, match="grammar"):
        served.submit(PROMPT, grammar=regex_grammar("w5", "regex"), resume=(5,))
    with pytest.raises(UnsupportedField, match="continues no message"):
        served.submit(PROMPT, grammar=regex_grammar("w5", "regex"), grammar_prefix="w")
    text = AdapterTokenizer(None, {}, {"<call>": NewToken(60, ())}).to_json()
    with pytest.raises(UnsupportedField, match="the adapter adds tokens"):
        served.submit(PROMPT, grammar=regex_grammar("w5", "regex"), grammar_tokens=text)
    with pytest.raises(UnsupportedField, match="one grammar"):
        served.submit(PROMPT, grammar=json.dumps({"grammars": [{}, {}]}))
    assert served.engine.stop(60)


def test_folders_of_killed_processes_are_removed(folder: Path) -> None:
    spec = load_checkpoint(folder).spec
    code = (
        "import sys, os, time; from pathlib import Path; from app.engine.models.checkpoint import load_checkpoint\n"
        "from app.engine.vllm.lora_folder import LoraFolders\n"
        "folders = LoraFolders(load_checkpoint(Path(sys.argv[1])).spec, 16)\n"
        "print(folders.root, flush=True); os.kill(os.getpid(), 9)"
    )

    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    abandoned = Path(done.stdout.strip())
    assert abandoned.is_dir()
    folders = LoraFolders(spec, 16)
    other = LoraFolders(spec, 16)
    assert not abandoned.exists()
    assert folders.root.is_dir(), "another process's, or object's, stays while it is in use"
    for each in (folders, other):
        each.close()
        assert not each.root.exists()


def test_what_waits_in_the_worker_counts_as_waiting(folder: Path) -> None:
    served = Served("fake", folder, num_waiting=2, step_s=0.05)
    assert served.engine.stats().num_waiting == 0, "nothing is there"
    assert served.engine.stats().engine == "fake 1"
    names = [served.submit(PROMPT, max_tokens=200) for _ in range(3)]
    served.wait(lambda: all(name in served.chunks for name in names))
    stats = served.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert served.engine.stop(60)
