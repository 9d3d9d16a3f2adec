"""How CPU kernels are compiled: a cache that knows stale code, arithmetic as written, and what the machine can do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from app.kernels.machine import jit as module
from app.kernels.machine.jit import compile_seconds, has_feature, jit
from tests.seeds import rng

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of kernels of our own, whose cache folder is asked for."""
    root = tmp_path / "app" / "kernels"
    (tmp_path / "app" / "engine" / "cpu").mkdir(parents=True)
    for name in ("machine/compiled.py", "matmul/cpu.py", "matmul/torch.py", "sgmv/triton.py", "sgmv/reference.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(module, "__file__", str(root / "machine" / "compiled.py"))
    monkeypatch.setenv("POLYLORA_CACHE", str(tmp_path / "cache"))
    return root


def folder() -> Path:
    return module._cache_folder()


@pytest.mark.usefixtures("package")
def test_the_cache_lies_where_the_operator_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder()
    assert first.parent == tmp_path / "cache" / "kernels"
    monkeypatch.setenv("POLYLORA_CACHE", str(tmp_path / "elsewhere"))
    assert folder() == tmp_path / "elsewhere" / "kernels" / first.name
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYLORA_CACHE", "~/mine")  # from a file of Docker's or systemd's, which no shell reads
    assert folder() == tmp_path / "home" / "mine" / "kernels" / first.name
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("POLYLORA_CACHE")
        else:
            monkeypatch.setenv("POLYLORA_CACHE", unset)
        assert folder() == tmp_path / "home" / ".cache" / "polylora" / "kernels" / first.name


@pytest.mark.usefixtures("package")
def test_the_same_sources_have_the_same_folder() -> None:
    assert folder() == folder()
    assert not folder().exists(), "asking does not create it"


def test_a_changed_a_new_and_a_moved_source_have_another_folder(package: Path) -> None:
    seen = {folder()}
    source = package / "matmul" / "cpu.py"
    for change in (
        lambda: source.write_text("# another body\n"),
        lambda: (package / "matmul" / "storing.py").write_text(""),
        lambda: source.rename(package / "sgmv" / "cpu.py"),
        (package / "sgmv" / "cpu.py").unlink,
    ):
        change()
        assert folder() not in seen
        seen.add(folder())


def test_what_the_engine_compiles_kernels_into_counts_as_they_do(package: Path) -> None:
    before = folder()
    decoder = package.parent / "engine" / "cpu" / "decoder.py"
    decoder.write_text("# calls kernels\n")
    assert folder() != before
    before = folder()
    (package.parent / "engine" / "engine.py").write_text("# compiles nothing\n")
    assert folder() == before


def test_every_compiled_function_stands_in_a_folder_that_the_cache_knows() -> None:
    app = Path(module.__file__).parents[2]
    users = [file for file in app.rglob("*.py") if "machine.jit import jit" in file.read_text()]
    assert len(users) > 20
    known = [app / name for name in module._COMPILED]
    assert [file for file in users if not any(file.is_relative_to(root) for root in known)] == []


@pytest.mark.parametrize("form", ["torch", "triton", "xla", "pallas", "reference"])
def test_other_forms_change_nothing(package: Path, form: str) -> None:
    before = folder()
    (package / "matmul" / f"{form}.py").write_text("# not compiled by Numba\n")
    assert folder() == before
    (package / "matmul" / f"{form}s.py").write_text("# a source of its own, whatever it is called\n")
    assert folder() != before


def test_a_source_that_returns_finds_what_was_compiled_for_it(package: Path) -> None:
    before, source = folder(), package / "matmul" / "cpu.py"
    text = source.read_text()
    source.write_text("# tried\n")
    assert folder() != before
    source.write_text(text)
    assert folder() == before


def test_numba_writes_there_and_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = (
        "import numba; from app.kernels.cast_bf16 import cpu; import numpy as np\n"
        "cpu.round_rows(np.empty((0, 4), np.int64), 0, 0, 1, np.empty(1, np.uint16))\n"
        "stats = cpu.round_rows.stats\n"
        "print(numba.config.CACHE_DIR, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    environ = os.environ | {"POLYLORA_CACHE": str(tmp_path)}
    found = [
        subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=environ, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    (where, *first), (again, *second) = (run.stdout.split() for run in found)
    assert where == again
    assert Path(where).parent == tmp_path / "kernels"
    assert (first, second) == (["0", "1"], ["1", "0"])
    assert list(Path(where).rglob("*.nbi"))


@jit
def _in_order(terms):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(terms.shape[0]):
        total += terms[i]
    return total


@jit
def _multiply_add(a, b, c):  # type: ignore[no-untyped-def]
    return a * b + c


@jit
def _quotient(a, b):  # type: ignore[no-untyped-def]
    return a / b


def test_sums_are_added_in_the_order_written() -> None:
    terms = (rng().standard_normal(3000) * 10.0 ** rng().integers(-3, 4, 3000)).astype(np.float32)
    assert _in_order(terms) == np.add.accumulate(terms)[-1]
    assert _in_order(np.array([1e8, 1, 1, 1, 1, -1e8], np.float32)) == 0.0


def test_a_product_is_rounded_before_it_is_added_to() -> None:
    """What a fused multiply-add would leave of a product less itself is the product's rounding error."""
    for a, b in rng().standard_normal((500, 2)).astype(np.float32):
        assert _multiply_add(a, b, -(a * b)) == 0.0


def test_a_division_by_zero_is_numpys() -> None:
    one, zero = np.float32(1), np.float32(0)
    assert _quotient(one, zero) == math.inf
    assert _quotient(-one, zero) == -math.inf
    assert math.isnan(_quotient(zero, zero))


def test_features_are_those_that_code_is_compiled_for() -> None:
    assert not has_feature("no-such-feature")
    assert not has_feature("")
    command = [sys.executable, "-c", "from app.kernels.machine.jit import has_feature as has\n"
               "print(has('avx2'), has('avx512f'), has('avx'), has('avx51'))"]  # fmt: skip
    expected = {"+avx,+avx2": "True False True False", "+avx512f,-avx2": "False True False False"}
    for features, answer in expected.items():
        environ = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
        run = subprocess.run(command, cwd=_ROOT, env=environ, check=True, capture_output=True, text=True)
        assert run.stdout.strip() == answer


def test_the_process_uses_the_folder_of_the_sources_that_it_runs() -> None:
    assert folder() == Path(numba.config.CACHE_DIR)


def test_compiling_is_timed_and_calling_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @jit
    def inner(value: float) -> float:
        return value + 1.0

    @jit
    def outer(value: float) -> float:
        return inner(value) * 2.0

    before, began_s = compile_seconds(), time.perf_counter()
    assert outer(1.0) == 4.0
    took = compile_seconds() - before
    assert 0.0 < took <= time.perf_counter() - began_s, "a function that is compiled within another counts once"
    assert outer(2.0) == 6.0
    assert compile_seconds() == before + took


def test_one_process_compiles_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def other() -> None:
        with module.compile_lock(2.0):
            order.append("other")

    thread = threading.Thread(target=other)
    with module.compile_lock(1.0):
        thread.start()
        thread.join(0.3)
        with module.compile_lock("of another type"):
            order.append("first")
    thread.join(60)
    assert order == ["first", "other"]
    monkeypatch.setattr(module, "_WAIT_S", 0.0)
    with module.compile_lock(), module.compile_lock():
        pass  # one that hangs is not waited for


def test_a_file_system_without_locks_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lustre without the mount option flock, NFS without its lock service."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with module.compile_lock(3.0), module.compile_lock(3.0):
        assert caplog.text.count("several processes may compile the same: [Errno 38] no locks here") == 1


def test_processes_that_save_at_once_keep_their_forms_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both read the index before either writes it, unless one waits."""

    def twice(value: float) -> float:
        return value + value

    both_have_read = threading.Barrier(2)
    load_index = IndexDataCacheFile._load_index

    def load_together(file: IndexDataCacheFile) -> object:
        found = load_index(file)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_read.wait(1.0)
        return found

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = numba.njit(twice)
    assert (compiled(2), compiled(0.5)) == (4, 1.0)
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", load_together)
    threads = [
        threading.Thread(target=jit(twice)._cache.save_overload, args=(args, form))
        for args, form in compiled.overloads.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    both_have_read.abort()
    found = [jit(twice)._cache.load_overload(args, compiled.targetctx) for args in compiled.overloads]
    assert [form and form.signature.args for form in found] == list(compiled.overloads)
