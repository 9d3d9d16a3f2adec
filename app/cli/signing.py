"""`polylora keygen` and `polylora sign`: sign adapters.

The adapter is read on its base model, as a server would: what cannot be served is not signed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from app.cli.adapters import add_base_options, base_spec_of
from app.engine.adapters.adapter import FEATURES
from app.engine.adapters.formats.reading import read_adapter


def add_signing_commands(commands: Any) -> None:
    keygen = commands.add_parser("keygen", help="make a key for signing adapters")
    keygen.add_argument("key", type=Path, help="file to write the private key to; prints the public key")
    keygen.set_defaults(run=_keygen)

    sign = commands.add_parser("sign", help="sign an adapter for a base model")
    sign.add_argument("source", type=Path, help="PEFT folder or card")
    sign.add_argument("--key", type=Path, required=True, help="a file made by keygen")
    add_base_options(sign)
    sign.set_defaults(run=_sign)


def _keygen(arguments: argparse.Namespace) -> int:
    from app.engine.adapters.signing.signing import new_private_key, public_key

    print(public_key(new_private_key(arguments.key)))
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    from app.engine.adapters.signing.signing import public_key, read_private_key, sign, signature_path

    key = read_private_key(arguments.key)
    spec = base_spec_of(arguments)
    digest = read_adapter(arguments.source, spec, served=FEATURES).card.digest
    path = signature_path(arguments.source)
    path.write_text(sign(digest, key))
    print(f"wrote {path}: {digest[:12]} on '{spec.name}', signed by {public_key(key)}")
    return 0
