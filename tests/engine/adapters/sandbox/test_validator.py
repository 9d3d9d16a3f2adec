"""Validation happens elsewhere: bombs, hangs and crashes end a child, not us."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.combining.combination import Combination, CombinationMethod, CombinationPart
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox import reader_process as reading_process
from app.engine.adapters.sandbox import reader_worker as reading_fork
from app.engine.adapters.sandbox.confinement import confinement_gaps
from app.engine.adapters.sandbox.packing import unpack_adapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits
from app.engine.adapters.sandbox.reader_worker import NICENESS, CombineTask, ReaderTask, pack_task, parse_task
from app.engine.adapters.sandbox.validator import Validator, adapter_files, files_digest
from app.engine.errors import (
    AdapterError,
    AdapterFormatError,
    AdapterMismatch,
    AdapterReadFailed,
    AdapterTooLarge,
    EngineFailure,
)
from tests.engine.adapters.random_adapters import (
    peft_beyond,
    peft_config,
    peft_tensors,
    random_arrays,
    tiny_spec,
    write_peft,
)

ROOT = Path(__file__).parents[4]
SPEC = tiny_spec()


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    """One warm process for all tests here: what one adapter does to its reader, the next does not see."""
    validator = Validator()
    yield validator
    validator.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.01)


def test_readers_give_way_to_engines() -> None:
    process = reading_process.ReaderProcess()
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == min(ours + NICENESS, 19))
    process.close()


def card_of(validator: Validator, path: Path) -> AdapterCard:
    return validator.read(path, SPEC).card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_peft(
        tmp_path / "adapter", peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    )


@pytest.mark.skipif(bool(confinement_gaps()), reason=f"a process here {confinement_gaps()}")
@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "os.listdir('/')",
        "socket.socket()",
        "os.unlink(VICTIM)",
        "os.truncate(VICTIM, 0)",
        "os.execv('/bin/true', ['true'])",
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "open(VICTIM, 'wb')",
    ],
)
def test_a_reader_opens_nothing_but_its_adapter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    (victim := tmp_path / "victim").write_text("whole")
    crashing(monkeypatch, tmp_path, f"VICTIM = {str(victim)!r}\nr.read_adapter = lambda *_: {attempt}")
    validator = Validator()
    with pytest.raises(AdapterFormatError, match="PermissionError"):
        validator.read(folder, SPEC)
    validator.close()
    assert victim.read_text() == "whole"


def test_what_the_kernel_cannot_deny_readers_is_logged_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading_process, "confinement_gaps", lambda: ["can read every file"])
    with caplog.at_level("WARNING"):
        reading_process.ReaderProcess().close()
    assert [record.message for record in caplog.records] == ["a process that reads adapters can read every file"]


def test_a_task_travels_as_json() -> None:
    task = ReaderTask(Path("/a/\udcffb"), SPEC, ReadLimits(), frozenset({"dora", "rows"}), 1 << 40, 20.5)
    assert parse_task(pack_task(task)) == task
    part = CombinationPart(AdapterRef("a", "d" * 64, "acme", 8, "file:///a"), 0.5)
    method = CombinationMethod("dare_ties", density=0.5, majority_sign="total", seed=2**63)
    combined = CombineTask(
        Combination((part, part._replace(weight=-1.0), part), method), SPEC, [{}], [64], 1 << 20, 2.5
    )
    assert parse_task(pack_task(combined)) == combined


def test_a_good_adapter_arrives_whole(folder: Path, validator: Validator) -> None:
    expected = read_adapter(folder, SPEC)
    card = folder.parent / f"adapter{CARD_SUFFIX}"
    raw = read_raw_peft(folder, SPEC)
    write_card(card, ArrowCard("a", raw, json.loads(raw.metadata)))
    for path in (folder, card):
        header, arrays = validator.read(path, SPEC)
        assert not arrays[0].flags.writeable
        adapter = unpack_adapter(header, arrays)
        assert adapter.card == expected.card
        assert list(adapter.weights) == list(expected.weights)
        for key, pair in adapter.weights.items():
            for got, wanted in zip(pair, expected.weights[key], strict=True):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("features", [("lora_bias", "saved", "rows"), ("dora",), ("embedding",)])
def test_what_goes_beyond_plain_lora_arrives_too(tmp_path: Path, features: tuple[str, ...]) -> None:
    folder = write_peft(tmp_path, *peft_beyond(SPEC, features=features))
    validator = Validator(supported_features=FEATURES)
    header, arrays = validator.read(folder, SPEC)
    validator.close()
    got, expected = unpack_adapter(header, arrays), read_adapter(folder, SPEC, supported_features=FEATURES)
    assert got.features == expected.features
    assert got.card == expected.card
    for name, (ids, rows) in expected.token_rows.items():
        assert got.token_rows[name].token_ids == ids
        np.testing.assert_array_equal(got.token_rows[name].rows, rows)
    for name, values in expected.replaced.items():
        np.testing.assert_array_equal(got.replaced[name], values)


def test_the_readers_error_is_ours(folder: Path, validator: Validator) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, error, says in [
        ({"r": 0}, AdapterFormatError, "'r' is 0"),
        ({"target_modules": ["c_attn"]}, AdapterFormatError, "PEFT would drop it"),
    ]:
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(error, match=says):
            validator.read(folder, SPEC)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterMismatch, match=r"1 layers"):
        validator.read(folder, tiny_spec(1))


def _header_bomb(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def _million_tensors(folder: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(entry % index for index in range(10**6)) + "}").encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def _high_rank(folder: Path) -> None:
    write_peft(folder, peft_config(10**5, ["q_proj"]), {"a": np.zeros(1, "f4")})


def _huge_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b'{"a": "' + b"x" * 100_000_000 + b'"}')


def _endless(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")


def _sparse_terabyte(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "attack", [_header_bomb, _million_tensors, _high_rank, _huge_config, _endless, _sparse_terabyte]
)
def test_attacks_are_refused_before_the_time_is_up(
    folder: Path, validator: Validator, attack: Callable[[Path], None]
) -> None:
    """AdapterReadFailed would mean that a limit of the process, not of the reader, ended it."""
    attack(folder)
    with pytest.raises((AdapterFormatError, AdapterTooLarge)) as caught:
        validator.read(folder, SPEC)
    assert type(caught.value) is not AdapterReadFailed


def test_memory_is_bounded(folder: Path) -> None:
    """A zero-filled, sparse file of valid shape: 672 MB to read, and twice that again in float32."""
    rows = 3_000_000
    header = {}
    for index, (half, shape) in enumerate({"A": [rows, 24], "B": [32, rows]}.items()):
        start = 0 if index == 0 else 4 * rows * 24
        offsets = [start, start + 4 * shape[0] * shape[1]]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * rows * 56)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(rows, ["q_proj"], layers_to_transform=0)))
    validator = Validator(ReadLimits(max_rank=rows), ReaderLimits(base_memory_bytes=800 << 20, memory_per_byte=0))
    with pytest.raises(AdapterTooLarge, match="memory"):
        validator.read(folder, SPEC)
    validator.close()


def test_time_is_bounded_and_not_a_verdict(folder: Path) -> None:
    validator = Validator(reader_limits=ReaderLimits(base_s=0.0, bytes_per_s=1e12))
    for _ in range(2):
        with pytest.raises(AdapterReadFailed, match="stopped"):
            validator.read(folder, SPEC)
    assert validator.num_reads == 2
    validator.close()


def crashing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Readers run `code` where they would read: the warm process gets another program."""
    program = tmp_path / "python"
    main = (
        "import app.engine.adapters.sandbox.reader_worker as r, os, signal, socket, sys\n"
        f"{code}\n"
        "r.serve(socket.socket(fileno=int(sys.argv[3])))"
    )
    (tmp_path / "main.py").write_text(main)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "main.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(reading_process.sys, "executable", str(program))


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("r.read_adapter = lambda *_: __import__('ctypes').string_at(0)", AdapterReadFailed, "without a result"),
        ("r.read_adapter = lambda *_: os._exit(0)", AdapterReadFailed, "without a result"),
        ("r.read_adapter = lambda *_: 1 / 0", AdapterFormatError, "ZeroDivisionError"),
        ("r.read_adapter = lambda *_: bytes(1 << 40)", AdapterTooLarge, "memory"),
        (
            "r.read_adapter = lambda *_: open(__file__ + '.out', 'wb', buffering=0).write(b'x')",
            AdapterFormatError,
            "OSError|PermissionError",
        ),
    ],
)
def test_a_reader_that_misbehaves_ends_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type[AdapterError], says: str
) -> None:
    crashing(monkeypatch, tmp_path, code)
    validator = Validator()
    for _ in range(2):
        with pytest.raises(error, match=says):
            validator.read(folder, SPEC)
    assert validator._process.num_starts == 1
    validator.close()


def test_a_warm_process_that_dies_is_replaced(folder: Path) -> None:
    validator = Validator()
    card = card_of(validator, folder)
    for expected in (2, 3):
        os.kill(validator._process.pid, signal.SIGKILL)
        with ThreadPoolExecutor(6) as threads:
            cards = list(threads.map(lambda _: card_of(validator, folder), range(12)))
        assert cards == [card] * 12
        assert validator._process.num_starts == expected
    validator.close()


def test_a_reader_waits_with_the_last_adapters_memory_at_hand(folder: Path) -> None:
    """It serves the next adapter, whatever that one's size, or dies, and another is made."""
    validator = Validator()
    first = card_of(validator, folder)
    process = validator._process
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def waiting() -> int:
        assert process._preforked is not None
        until(lambda: os.fstat(process._preforked.shared).st_blocks * 512 >= first.size_bytes)
        until(lambda: len(children.read_text().split()) == 1)  # the one that read has ended
        return int(children.read_text())

    for change in (1, 2):
        waited = waiting()
        larger = write_peft(
            folder.parent / f"{change}", peft_config(64, ["q_proj"]), peft_tensors(random_arrays(SPEC, 64, ["q_proj"]))
        )
        if change == 2:
            os.kill(waited, signal.SIGKILL)
            until(lambda: not children.read_text().strip())
        header, arrays = validator.read(larger, SPEC)
        expected = read_adapter(larger, SPEC)
        for key, pair in unpack_adapter(header, arrays).weights.items():
            for got, wanted in zip(pair, expected.weights[key], strict=True):
                np.testing.assert_array_equal(got, wanted)
        assert waiting() != waited
        assert card_of(validator, folder) == first
    assert process.num_starts == 1
    validator.close()


def test_a_process_that_does_not_stay_is_said_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_process.sys, "executable", "/bin/false")
    validator = Validator()
    with pytest.raises(EngineFailure, match="does not stay alive"):
        validator.read(folder, SPEC)
    validator.close()


COUNTING_FILES = """
import os, sys, time
from pathlib import Path
from app.engine.adapters.sandbox.validator import Validator
from tests.engine.adapters.random_adapters import tiny_spec

before = set(os.listdir("/proc/self/fd"))
validator = Validator()
pid = validator._process.pid
for _ in range(20):
    validator.read(Path(sys.argv[1]), tiny_spec())
children = Path(f"/proc/{pid}/task/{pid}/children")
while len(children.read_text().split()) != 1:  # the last reader has answered and ends, another is made and waits
    time.sleep(0.01)
waiting = children.read_text().strip()
validator.close()
while Path(f"/proc/{waiting}").exists():
    time.sleep(0.01)
assert not Path(f"/proc/{pid}").exists()
assert set(os.listdir("/proc/self/fd")) == before
"""


def test_nothing_is_left_behind(folder: Path) -> None:
    """In a process of its own: what else runs in this one opens and closes files as it likes."""
    ended = subprocess.run(
        [sys.executable, "-c", COUNTING_FILES, str(folder)], cwd=ROOT, stderr=subprocess.PIPE, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()


def test_the_warm_process_ends_with_its_server() -> None:
    code = (
        "from app.engine.adapters.sandbox.reader_process import ReaderProcess; import os; "
        "print(ReaderProcess().pid, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    status = Path(f"/proc/{int(ended.stdout)}/stat")
    until(lambda: not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def test_the_warm_process_does_not_load_torch() -> None:
    code = "import app.engine.adapters.sandbox.reader_process, sys; "
    code += "print(sorted({'torch', 'ray', 'jax'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_a_refusal_is_reached_once_per_contents(folder: Path) -> None:
    validator = Validator()
    card = card_of(validator, folder)
    good = (folder / "adapter_config.json").read_bytes()
    bad = good.replace(b'"r": 2', b'"r": 3')
    copy = write_peft(folder.parent / "copy", {}, {"a": np.zeros(1, "f4")})
    (copy / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    messages = set()
    for path in (folder, folder, copy):
        (path / "adapter_config.json").write_bytes(bad)
        with pytest.raises(AdapterFormatError) as caught:
            validator.read(path, SPEC)
        messages.add(str(caught.value))
    assert validator.num_reads == 2, "one good, one bad"
    assert len(messages) == 1
    (folder / "adapter_config.json").write_bytes(good)
    assert card_of(validator, folder) == card, "of the same length, but mended"
    assert validator.num_reads == 3
    (folder / "adapter_config.json").write_bytes(bad)
    with pytest.raises(AdapterError):
        validator.read(folder, tiny_spec(1, digest="another"))
    assert validator.num_reads == 4
    validator.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENFILE])
@pytest.mark.parametrize("is_card", [True, False])
def test_what_the_machine_could_not_read_is_not_the_adapters_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_card: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = folder
    if is_card:
        path = folder.parent / f"adapter{CARD_SUFFIX}"
        write_card(path, ArrowCard("a", read_raw_peft(folder, SPEC), {}))
    with monkeypatch.context() as patch:
        patch.setattr("app.engine.adapters.bounded_files.os.open", fail)
        with pytest.raises(AdapterReadFailed, match=os.strerror(number)):
            read_adapter(path, SPEC)
        patch.setattr("app.engine.adapters.bounded_files.Path.stat", fail)
        with pytest.raises(AdapterReadFailed, match=os.strerror(number)):
            adapter_files(path)


def test_a_reader_without_memory_is_not_the_adapters_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    task = ReaderTask(folder, SPEC, ReadLimits(), frozenset(), 1 << 30, 20.0)
    monkeypatch.setattr(reading_fork, "_map", fail)
    verdict, _ = reading_fork._read_and_pack(task, -1)
    assert verdict["error"] == "AdapterReadFailed"


def test_a_machine_without_memory_for_reading_is_not_the_adapters_fault(
    folder: Path, validator: Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process may have no more files, or none may grow: what waits for it is a 503, and nothing leaks."""
    digest = validator.read(folder, SPEC).card.digest  # now a reader waits for the next one, too
    num_files = len(os.listdir("/proc/self/fd"))

    def full(descriptor: int, size_bytes: int) -> None:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: {descriptor} of {size_bytes}")

    with monkeypatch.context() as patch:
        patch.setattr(reading_process.os, "ftruncate", full)
        for _ in range(3):
            with pytest.raises(AdapterReadFailed, match=r"no memory for reading an adapter: .*File too large"):
                validator.read(folder, SPEC)
    assert len(os.listdir("/proc/self/fd")) <= num_files
    assert validator.read(folder, SPEC).card.digest == digest


def test_a_refused_file_that_cannot_be_hashed_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may open it, say, and somebody puts that right."""
    validator = Validator()
    with monkeypatch.context() as patch:

        def may_not(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        refusal = AdapterFormatError("cannot open 'adapter_model.safetensors': Permission denied")
        patch.setattr(validator._process, "read", Mock(side_effect=refusal))
        patch.setattr("app.engine.adapters.sandbox.validator.open_plain_file", may_not)
        for _ in range(2):
            with pytest.raises(AdapterFormatError) as caught:
                validator.read(folder, SPEC)
            assert caught.value is refusal
    assert card_of(validator, folder).max_rank == 2
    validator.close()


def test_refusals_are_bounded(folder: Path) -> None:
    validator = Validator(max_refusals=1)
    (folder / "adapter_config.json").write_text("{}")
    for base in ("one", "two", "one"):
        with pytest.raises(AdapterFormatError):
            validator.read(folder, tiny_spec(digest=base))
    assert validator.num_reads == 3
    assert len(validator._refusals) == 1
    validator.close()


def test_files_digest_sees_every_byte(folder: Path) -> None:
    digests = {files_digest(folder, SPEC), files_digest(folder, tiny_spec(digest="other"))}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        contents = (folder / name).read_bytes()
        (folder / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
        digests.add(files_digest(folder, SPEC))
        (folder / name).write_bytes(contents)
    assert len(digests) == 4
    assert files_digest(folder, SPEC) in digests


def test_patterns_run_in_the_reader_and_slow_ones_end_with_a_verdict(tmp_path: Path, validator: Validator) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    good = write_peft(tmp_path / "good", peft_config(2, target_modules=r".*(?<!k_)(?=q_proj)\w+"), tensors)
    slow = write_peft(tmp_path / "slow", peft_config(2, target_modules=r"((.*)*)*((a|.)+)+q_proj(x?){20}y"), tensors)
    assert card_of(validator, good).targets == ("q_proj",)
    with pytest.raises(AdapterFormatError, match=r"target_modules: pattern .* takes longer than 1 s of processor time"):
        validator.read(slow, SPEC)
