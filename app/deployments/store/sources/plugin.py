"""A downloader of the operator's own.

In: the dotted path of a function `download(uri: str, folder: pathlib.Path) -> str | None`. It puts an adapter's files
into an empty folder, from any thread, and may return the URI that gives the same contents again (a commit
instead of a branch). It gets every URI that no other source is configured for, `hf://` included. What it
leaves in the folder is trusted no more than any other download.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from app.dotted import import_dotted
from app.engine.errors import ConfigError, PolyloraError, SourceError


class PluginFetcher:
    """`sources.places.Fetcher`. Raises ConfigError if there is no such function."""

    def __init__(self, dotted_path: str) -> None:
        self._name = dotted_path
        self._download = _load(dotted_path)

    def accepts(self, uri: str) -> bool:  # noqa: ARG002  (whatever is left)
        return True

    def fetch(self, uri: str, folder: Path) -> str:
        """Raises SourceError, and any PolyloraError of the plug-in's."""
        try:
            exact = self._download(uri, folder)
        except PolyloraError:
            raise
        except Exception as error:
            # Another's code: whatever it raises is this source's failure.
            raise SourceError(f"{self._name} cannot fetch {uri}: {type(error).__name__}: {str(error)[:300]}") from error
        return exact or uri


def _load(dotted_path: str) -> Callable[[str, Path], str | None]:
    download: Callable[[str, Path], str | None] = import_dotted(dotted_path, "adapters.downloader")
    if not callable(download):
        raise ConfigError(f"adapters.downloader {dotted_path!r} is not a function of (uri, folder)")
    return download
