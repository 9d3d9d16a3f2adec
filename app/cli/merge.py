"""`polylora merge`: an adapter merged into its base, as a folder that transformers and this service load.

In: arguments. Out: a folder and a line on stdout; what cannot be merged goes to the caller as an `AdapterError`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from app.cli.adapters import add_base_options


def add_merge(commands: Any) -> None:
    """Add it to `argparse.ArgumentParser.add_subparsers()`."""
    parser = commands.add_parser("merge", help="write the base with an adapter merged into it")
    parser.add_argument("adapter", type=Path, help="PEFT folder or card")
    parser.add_argument("target", type=Path, help="a new folder")
    add_base_options(parser)
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.engine.adapters.adapter import FEATURES
    from app.engine.adapters.formats.reading import read_adapter
    from app.engine.adapters.merge import merge
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    checkpoint = load_checkpoint(resolve_model(arguments.base or read_settings(arguments.config).model.uri))
    adapter = read_adapter(arguments.adapter, checkpoint.spec, supported_features=FEATURES)
    num_modules = merge(checkpoint, adapter, arguments.target)
    print(f"wrote {arguments.target}: {num_modules} modules merged")
    return 0
