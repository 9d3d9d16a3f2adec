"""Look at an adapter from outside in a process that may die.

In: a path (from `resolve_adapter_path`) and the base's `ModelSpec`. Out: the adapter's card, or the
`AdapterError` that says why not. The bytes are first touched by a child process with bounded memory
and time and no right to write, so that neither a bomb nor a bug in a library reaches the server. A
verdict is kept by the hash of the files: a bad adapter is read once, not in a loop.

`python -m app.engine.adapters.validate` is the child; it imports neither torch nor Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.engine import errors
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.limits import DEFAULT_LIMITS, MIB, ReadLimits, regular_file_size
from app.engine.adapters.peft_config import CONFIG_NAME
from app.engine.adapters.peft_file import WEIGHTS_NAME
from app.engine.adapters.reading import read_adapter
from app.engine.errors import AdapterError, AdapterFormatError, AdapterTooLarge
from app.engine.models.spec import ModelSpec

_PROJECT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What the child may use for an adapter of s bytes: `base + per_byte * s` memory and `base_s + s / rate` time.

    Reading needs up to six times an adapter's size: its bytes, and both matrices in float32, twice.
    """

    base_memory_bytes: int = 1024 * MIB
    memory_per_byte: int = 8
    base_s: float = 20.0
    bytes_per_s: float = 20.0 * MIB

    def memory_bytes(self, size: int) -> int:
        return self.base_memory_bytes + self.memory_per_byte * size

    def seconds(self, size: int) -> float:
        return self.base_s + size / self.bytes_per_s


class Validator:
    """Verdicts on adapters, each reached once per (files, base) while it is remembered.

    Called from any thread. Two simultaneous questions about one adapter start one child.
    """

    def __init__(
        self,
        limits: ReadLimits = DEFAULT_LIMITS,
        child: ChildLimits | None = None,
        max_verdicts: int = 4096,
        served: frozenset[str] = frozenset(),
    ) -> None:
        """`served`: what the engine can apply beyond plain LoRA, see `build_adapter`."""
        self.limits = limits
        self.served = served
        self.child = child or ChildLimits()
        self.num_children = 0
        self._max_verdicts = max_verdicts
        self._verdicts: OrderedDict[str, AdapterCard | AdapterError] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def validate(self, path: Path, spec: ModelSpec) -> AdapterCard:
        """The card of the adapter at `path`. Raises the `AdapterError` found, now or the first time."""
        key = files_digest(path, spec, self.limits)
        with self._lock:
            turn = self._locks.setdefault(key, threading.Lock())
        with turn:
            verdict = self._verdicts.get(key)
            if verdict is None:
                self.num_children += 1
                try:
                    verdict = validate_in_child(path, spec, self.limits, self.child, self.served)
                except AdapterError as error:
                    verdict = error
                self._remember(key, verdict)
        if isinstance(verdict, AdapterError):
            raise type(verdict)(str(verdict))
        return verdict

    def _remember(self, key: str, verdict: AdapterCard | AdapterError) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > self._max_verdicts:
                oldest, _ = self._verdicts.popitem(last=False)
                self._locks.pop(oldest, None)


def files_digest(path: Path, spec: ModelSpec, limits: ReadLimits = DEFAULT_LIMITS) -> str:
    """Hex SHA-256 of the adapter's files as they lie there, and of the base they are for."""
    digest = hashlib.sha256(b"polylora/files/v1\0" + hashlib.sha256(spec.digest.encode()).digest())
    for file in _files(path):
        digest.update(file.name.encode(errors="surrogateescape") + b"\0")
        size = _checked_size(file, limits)
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def validate_in_child(
    path: Path,
    spec: ModelSpec,
    limits: ReadLimits = DEFAULT_LIMITS,
    child: ChildLimits | None = None,
    served: frozenset[str] = frozenset(),
) -> AdapterCard:
    """The card of the adapter at `path`, read in a child process. Raises the `AdapterError` it met."""
    child = child or ChildLimits()
    size = sum(_checked_size(file, limits) for file in _files(path))
    memory, seconds = child.memory_bytes(size), child.seconds(size)
    task = pickle.dumps((str(path), spec, limits, served, memory, seconds))
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT), "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-m", "app.engine.adapters.validate"]
    try:
        ended = subprocess.run(command, input=task, capture_output=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise AdapterTooLarge(
            f"'{path.name}' was not read within {seconds:.0f} s; its validation was stopped"
        ) from None
    try:
        verdict = json.loads(ended.stdout)
    except ValueError:
        last = ended.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1][:200]
        raise AdapterFormatError(
            f"reading '{path.name}' ended its validation (exit status {ended.returncode}): {last or 'no message'}"
        ) from None
    if "card" not in verdict:
        raise _error_class(verdict["error"])(verdict["message"])
    return AdapterCard(**verdict["card"] | {"targets": tuple(verdict["card"]["targets"])})


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [path / name for name in (CONFIG_NAME, WEIGHTS_NAME) if (path / name).exists()]


def _checked_size(file: Path, limits: ReadLimits) -> int:
    size = regular_file_size(file)
    bound = limits.max_config_bytes if file.name == CONFIG_NAME else limits.max_weight_bytes
    if size > bound:
        raise AdapterTooLarge(f"'{file.name}' has {size} bytes but at most {bound} are read")
    return size


def _error_class(name: str) -> type[AdapterError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, AdapterError) else AdapterFormatError


def _limit_this_process(memory_bytes: int, seconds: float) -> None:
    """From here on a request for more is refused by the kernel, or ends this process."""
    for what, bound in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }.items():
        _, hard = resource.getrlimit(what)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)  # noqa: PLW2901
        resource.setrlimit(what, (bound, bound))


def _child() -> None:
    path, spec, limits, served, memory_bytes, seconds = pickle.load(sys.stdin.buffer)  # written by our own parent
    _limit_this_process(memory_bytes, seconds)
    verdict: dict[str, Any]
    try:
        verdict = {"card": asdict(read_adapter(Path(path), spec, limits, served).card)}
    except AdapterError as error:
        verdict = {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        message = f"reading it needs more than {memory_bytes} bytes of memory"
        verdict = {"error": AdapterTooLarge.__name__, "message": message}
    print(json.dumps(verdict))


if __name__ == "__main__":
    _child()
