"""Where a machine caches models, compiled kernels and packed weights, and digests of the code that made them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path


def default_cache_dir() -> Path:
    """`POLYLORA_CACHE`, else ~/.cache/polylora."""
    return Path(os.environ.get("POLYLORA_CACHE") or "~/.cache/polylora").expanduser()


def source_digest(root: Path, folders: Collection[str], except_stems: Collection[str] = ()) -> str:
    """SHA-256 of the paths and contents of the Python files in these folders of `root`, without these stems."""
    digest = hashlib.sha256()
    for source in sorted(source for folder in folders for source in (root / folder).rglob("*.py")):
        if source.stem not in except_stems:
            digest.update(str(source.relative_to(root)).encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()
