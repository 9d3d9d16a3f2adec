"""The adapter's files among the layers of an artifact.

Layers may hold more than the adapter: only files of known names are kept, each under a number, until the folder that
is the adapter is known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from app.deployments.store.sources.oci.archive import open_archive
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.formats.arrow import CARD_SUFFIX
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.signing.trusted_keys import SIGNATURE_NAME, SIGNATURE_SUFFIX
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

_NAMES = frozenset({CONFIG_NAME, WEIGHTS_NAME, SIGNATURE_NAME, *TEXT_FILES})
_SUFFIXES = (CARD_SUFFIX, CARD_SUFFIX + SIGNATURE_SUFFIX)
#: Begins the name of an image layer's entry that deletes a file of an earlier layer.
_WHITEOUT = ".wh."


def may_be_adapters(path: str) -> bool:
    """Whether a file of this path may belong to an adapter."""
    name = path.rpartition("/")[2]
    return name in _NAMES or name.endswith(_SUFFIXES)


class ArtifactFiles:
    """Files of known names, in a folder of its own. `reserve` (bytes) reserves disk space before a file is unpacked."""

    def __init__(self, folder: Path, max_bytes: int, reserve: Callable[[int], None]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._reserve = reserve
        self._files: dict[str, Path] = {}
        self._num_files = 0

    def new_file(self) -> Path:
        self._num_files += 1
        return self._folder / str(self._num_files)

    def add_file(self, path: str, file: Path) -> None:
        """A layer that is one file; it replaces one of the same path, as in an image's later layer."""
        self._files[path] = file

    def add_archive(self, file: Path, compression: str, check: Callable[[], object]) -> None:
        """A layer that is a tar archive, which is removed afterwards. `check` is called for each of its members."""
        with open_archive(file, compression, self._max_bytes) as members:
            for member in members:
                check()
                if member.path.rpartition("/")[2].startswith(_WHITEOUT):
                    raise AdapterFormatError(f"{short(member.path)} deletes a file of another layer; pack one layer")
                if may_be_adapters(member.path):
                    self._reserve(member.size_bytes)
                    member.copy_to(target := self.new_file())
                    self.add_file(member.path, target)
        file.unlink()

    def move_adapter_to(self, folder: Path, what: str) -> None:
        """Move the adapter's files out. AdapterFormatError unless there is exactly one adapter; `what` describes the
        artifact.
        """
        configs = [path for path in self._files if path.rpartition("/")[2] == CONFIG_NAME]
        cards = [] if configs else [path for path in self._files if path.endswith(CARD_SUFFIX)]
        found = configs or cards
        if len(found) != 1:
            listed = f"more than one: {short(sorted(found))}" if found else "none"
            raise AdapterFormatError(
                f"an artifact must hold one adapter ({CONFIG_NAME} and {WEIGHTS_NAME}, or one {CARD_SUFFIX} file), "
                f"and {what} has {listed}"
            )
        parent, _, card = found[0].rpartition("/")
        for path, file in self._files.items():
            place, _, name = path.rpartition("/")
            if place == parent and (name in _NAMES if configs else name in (card, card + SIGNATURE_SUFFIX)):
                file.rename(folder / name)
