"""A custom fetcher of the operator's (`adapters.custom_fetcher`).

The dotted path names a function `download(uri: str, folder: pathlib.Path) -> str | None`, or a class without
constructor arguments and with `download_lora_to_disk(name: str, base_model: str, path: str)`, whose name is the URI.
Either puts an adapter's files into an empty folder, from any thread. The function may return a URI that gives the same
contents again (a commit instead of a branch); the method's result is ignored. It gets every URI that no other source
accepts, `hf://` included, and its files are trusted no more than any other download.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.engine.errors import ConfigError, PolyloraError, SourceError
from app.import_path import import_dotted

#: The method of a class that is a custom fetcher.
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
    if not callable(getattr(target, METHOD, None)):
        raise ConfigError(
            f"adapters.custom_fetcher {dotted_path!r} is a class without {METHOD}(name, base_model, path)"
        )
    try:
        method = getattr(target(), METHOD)
    except Exception as error:
        # Foreign code: whatever it raises, the setting is invalid.
        raise ConfigError(
            f"adapters.custom_fetcher {dotted_path!r} cannot be constructed: {type(error).__name__}: {str(error)[:300]}"
        ) from error

    def by_method(uri: str, folder: Path) -> None:
        method(uri, base_name, str(folder))

    return by_method
