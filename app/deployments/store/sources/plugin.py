"""A custom fetcher of the operator's (`adapters.custom_fetcher`).

The dotted path names a function `download(uri: str, folder: pathlib.Path) -> str | None`, or a class without
constructor arguments that is one of NVIDIA Dynamo's plug-ins: a source (`exists(uri)` and `download(uri, folder)`,
async or not) or a downloader (`download_lora_to_disk(name, base_model, path)`, whose name is the URI). Each puts an
adapter's files into an empty folder, from any thread; Dynamo's may return another folder instead, as a path or as an
object with `local_path`, whose files are then copied. The function may return a URI that gives the same contents again
(a commit instead of a branch). A fetcher gets every URI that no other source accepts, `hf://` included, and its files
are trusted no more than any other download.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.engine.errors import ConfigError, NotFound, PolyloraError, SourceError
from app.import_path import construct, import_dotted

#: The method of a class that is a downloader.
METHOD = "download_lora_to_disk"


class PluginFetcher:
    """A `Fetcher`. `base_name`: the base model's name for clients. Raises ConfigError if the path names neither."""

    def __init__(self, dotted_path: str, base_name: str) -> None:
        self._name = dotted_path
        self._download = _load(dotted_path, base_name)

    def accepts(self, uri: str) -> bool:  # noqa: ARG002  (any URI)
        return True

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:  # noqa: ARG002
        """Raises SourceError, and any PolyloraError of the plug-in's."""
        try:
            exact = self._download(uri, folder)
        except PolyloraError:
            raise
        except BaseException as error:
            # Foreign code in our thread: whatever it raises is this source's failure. SystemExit would end the event
            # loop that waits for the result.
            raise SourceError(f"{self._name} cannot fetch {uri}: {type(error).__name__}: {str(error)[:300]}") from error
        return exact or uri


def _load(dotted_path: str, base_name: str) -> Callable[[str, Path], str | None]:
    target: Any = import_dotted(dotted_path, "adapters.custom_fetcher")
    if not isinstance(target, type):
        if not callable(target):
            raise ConfigError(f"adapters.custom_fetcher {dotted_path!r} is not a function of (uri, folder)")
        download: Callable[[str, Path], str | None] = target
        return download
    is_source = callable(getattr(target, "download", None))
    if not is_source and not callable(getattr(target, METHOD, None)):
        raise ConfigError(
            f"adapters.custom_fetcher {dotted_path!r} is a class without {METHOD}(name, base_model, path) or "
            "download(uri, folder)"
        )
    plugin = construct(target, dotted_path, "adapters.custom_fetcher")

    def by_class(uri: str, folder: Path) -> None:
        if not is_source:
            _copy(_result(getattr(plugin, METHOD)(uri, base_name, str(folder))), folder)
            return
        exists = getattr(plugin, "exists", None)
        if exists is not None and not _result(exists(uri)):
            raise NotFound(f"{dotted_path} has no adapter at {uri[:200]!r}")
        _copy(_result(plugin.download(uri, folder)), folder)

    return by_class


def _result(value: Any) -> Any:
    """What a plug-in's method returned, awaited if it is a coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _copy(result: Any, folder: Path) -> None:
    """Copy the files of the folder that a plug-in returned, unless it is ours, or no folder."""
    place = getattr(result, "local_path", result)
    if not isinstance(place, str | Path) or not Path(place).is_dir() or Path(place).samefile(folder):
        return
    for file in Path(place).iterdir():
        if file.is_file():  # also a link, as in the hub's cache
            shutil.copyfile(file, folder / file.name)
