"""A downloader of the operator's own.

In: the dotted path of a function `download(uri: str, folder: pathlib.Path) -> str | None`, or of a class that is made
without arguments and has `download_lora_to_disk(name: str, base_model: str, path: str)`, whose name is the URI. Either
puts an adapter's files into an empty folder, from any thread. The function may return the URI that gives the same
contents again (a commit instead of a branch); what the method returns is not looked at. A downloader gets every URI
that no other source is configured for, `hf://` included. What it leaves in the folder is trusted no more than any
other download.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.engine.errors import ConfigError, PolyloraError, SourceError
from app.import_path import import_dotted

#: What a downloader that is a class has.
METHOD = "download_lora_to_disk"


class PluginFetcher:
    """`sources.places.Fetcher`. `base_name`: what clients call the base model. Raises ConfigError if there is neither
    such a function nor such a class.
    """

    def __init__(self, dotted_path: str, base_name: str) -> None:
        self._name = dotted_path
        self._download = _load(dotted_path, base_name)

    def accepts(self, uri: str) -> bool:  # noqa: ARG002  (whatever is left)
        return True

    def fetch(self, uri: str, folder: Path) -> str:
        """Raises SourceError, and any PolyloraError of the plug-in's."""
        try:
            exact = self._download(uri, folder)
        except PolyloraError:
            raise
        except BaseException as error:
            # Another's code, in a thread of ours: whatever it raises is this source's failure. SystemExit would end the
            # event loop that waits for the answer.
            raise SourceError(f"{self._name} cannot fetch {uri}: {type(error).__name__}: {str(error)[:300]}") from error
        return exact or uri


def _load(dotted_path: str, base_name: str) -> Callable[[str, Path], str | None]:
    found: Any = import_dotted(dotted_path, "adapters.custom_fetcher")
    if not isinstance(found, type):
        if not callable(found):
            raise ConfigError(f"adapters.custom_fetcher {dotted_path!r} is not a function of (uri, folder)")
        download: Callable[[str, Path], str | None] = found
        return download
    if not callable(getattr(found, METHOD, None)):
        raise ConfigError(
            f"adapters.custom_fetcher {dotted_path!r} is a class without {METHOD}(name, base_model, path)"
        )
    try:
        method = getattr(found(), METHOD)
    except Exception as error:
        # Another's code: whatever it raises, the setting is of no use.
        raise ConfigError(
            f"adapters.custom_fetcher {dotted_path!r} cannot be made: {type(error).__name__}: {str(error)[:300]}"
        ) from error

    def by_method(uri: str, folder: Path) -> None:
        method(uri, base_name, str(folder))

    return by_method
