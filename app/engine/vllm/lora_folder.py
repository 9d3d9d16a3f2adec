"""Plain LoRA folders: validated adapters in the one form that vLLM computes correctly.

alpha equals r, so vLLM's scale is 1 and the adapter's own is in B, in float32. Every module has the same r, padded with
zeros; every expert of a layer has its own pair. Folders lie in memory where the system has a folder for that, are named
by digest, and are never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import (
    LoraAdapter,
    LoraKey,
    LoraPair,
    Matrix,
    check_features,
    to_float32,
    unknown_module,
)
from app.engine.adapters.features import VLLM_FEATURES
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.formats.safetensors_file import write_safetensors
from app.engine.adapters.formats.tensor_names import PREFIX
from app.engine.adapters.modules import layer_modules
from app.engine.adapters.raw_adapter import RawTensor
from app.engine.errors import AdapterMismatch, AdapterTooLarge
from app.engine.models.linear_modules import LATENT_B
from app.engine.models.moe_weight_layouts import mixtral_module
from app.engine.models.spec import ModelSpec

#: Linux's folder in memory.
_MEMORY = Path("/dev/shm")
_PREFIX = "polylora-vllm-"
_LOCK = "lock"


class LoraFolders:
    """The folders of one engine process, in a folder of their own that no other user can read."""

    def __init__(self, spec: ModelSpec, max_lora_rank: int) -> None:
        self._spec, self._max_lora_rank = spec, max_lora_rank
        self._modules = layer_modules(spec)
        self._ranks: WeakKeyDictionary[LoraAdapter, int] = WeakKeyDictionary()
        self._paths = {module.keys[0]: path for path, module in self._modules.items() if not module.is_fused}
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = (unlocked / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.root = unlocked.rename(parent / unlocked.name.removeprefix("."))

    def check(self, adapter: LoraAdapter) -> int:
        """The adapter's r. AdapterMismatch if vLLM cannot compute it; AdapterTooLarge above `max_lora_rank`."""
        if (rank := self._ranks.get(adapter)) is None:  # each request of the adapter asks
            rank = self._ranks[adapter] = self._checked_rank(adapter)
        return rank

    def _checked_rank(self, adapter: LoraAdapter) -> int:
        check_features(adapter, VLLM_FEATURES)
        for key in adapter.weights:
            if key not in self._paths:
                raise unknown_module(key)
            if key.target.rpartition(".")[2] in LATENT_B.targets:
                raise AdapterMismatch(
                    f"vLLM multiplies {key.target!r} of layer {key.layer} into other weights and ignores a LoRA on it; "
                    "train the adapter without it, or use engine.cpu"
                )
        rank = max((pair.rank for pair in adapter.weights.values()), default=1)
        if rank > self._max_lora_rank:
            raise AdapterTooLarge(
                f"the adapter has rank {rank} but vLLM's slots hold {self._max_lora_rank}; raise "
                "engine.vllm.max_lora_rank or register an adapter of lower rank"
            )
        return rank

    def write(self, adapter: LoraAdapter) -> Path:
        """The adapter's folder, written unless it is there. Raises OSError."""
        folder = self.root / adapter.card.digest
        if folder.is_dir():
            return folder
        rank = self.check(adapter)
        tensors: dict[str, RawTensor] = {}
        targets = set()
        for key, pair in self._complete(adapter):
            path = self._vllm_path(key)
            targets.add(path.rpartition(".")[2])
            tensors[f"{PREFIX}{path}.lora_A.weight"] = _tensor(_pad(pair.a, rank))  # [r, d_in]
            tensors[f"{PREFIX}{path}.lora_B.weight"] = _tensor(_pad(pair.b, rank).T)  # [d_out, r]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets), "bias": "none"}
        unfinished = self.root / f"{adapter.card.digest}.unfinished"
        try:
            unfinished.mkdir(exist_ok=True)
            write_safetensors(unfinished / WEIGHTS_NAME, tensors)
            (unfinished / CONFIG_NAME).write_text(json.dumps(config))
            unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return folder

    def remove(self, digest: str) -> None:
        """Remove an adapter's folder, if there is one."""
        shutil.rmtree(self.root / digest, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def _complete(self, adapter: LoraAdapter) -> Iterator[tuple[LoraKey, LoraPair]]:
        """The adapter's pairs, and zeros for what vLLM expects beside them: it stacks the experts of a layer."""
        if not adapter.weights:  # a LoRA without tensors is refused by vLLM: zeros on the first module
            yield self._zeros(next(iter(self._paths)))
        yield from adapter.weights.items()
        mixed = {key.layer for key in adapter.weights if key.expert is not None}
        for key in self._paths:
            if key.layer in mixed and key.expert is not None and key not in adapter.weights:
                yield self._zeros(key)

    def _zeros(self, key: LoraKey) -> tuple[LoraKey, LoraPair]:
        d_in, (d_out,) = self._modules[self._paths[key]].shape(self._spec)
        return key, LoraPair(np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32))

    def _vllm_path(self, key: LoraKey) -> str:
        """A module's name in the checkpoints that vLLM reads."""
        path = self._paths[key]
        return mixtral_module(path) if self._spec.family == "mixtral" else path


def _pad(values: Matrix, rank: int) -> NDArray[np.float32]:
    """[r, d] in float32, with rows of zeros up to `rank`."""
    return np.pad(to_float32(values), ((0, rank - values.shape[0]), (0, 0)))


def _tensor(values: NDArray[np.float32]) -> RawTensor:
    return RawTensor("F32", values.shape, memoryview(values.tobytes()))


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: nothing holds their locks."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:  # another user's, or just being made
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
