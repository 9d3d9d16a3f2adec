"""`polylora keygen` and `polylora sign`: vouch for an adapter.

In: arguments. Out: a key file and its public half, or a signature beside the adapter; `keygen --admin` is about another
kind of key (`keys`). The adapter is read on
the base model it is for, as a server would: what cannot be served is not signed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from app.cli.adapters import add_base_options, add_config_option, base_spec_of
from app.engine.adapters.adapter import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.errors import ConfigError


def add_signing_commands(commands: Any) -> None:
    """Add the two to `argparse.ArgumentParser.add_subparsers()`."""
    keygen = commands.add_parser("keygen", help="make a key: for signing adapters, or with --admin the first admin key")
    keygen.add_argument("key", type=Path, nargs="?", help="file to write the private key to; prints its public half")
    keygen.add_argument("--admin", action="store_true", help="make an API key that manages tenants; prints it once")
    add_config_option(keygen, "whose service, with --admin")
    keygen.set_defaults(run=_keygen)

    sign = commands.add_parser("sign", help="sign an adapter for a base model")
    sign.add_argument("source", type=Path, help="PEFT folder or card")
    sign.add_argument("--key", type=Path, required=True, help="a file made by keygen")
    add_base_options(sign)
    sign.set_defaults(run=_sign)


def _keygen(arguments: argparse.Namespace) -> int:
    if arguments.admin == (arguments.key is not None):
        raise ConfigError("say which key: `keygen signing.pem` makes one for signing, `keygen --admin` an admin key")
    if arguments.admin:
        from app.cli.admin_key import make_admin_key, registered_in
        from app.cli.config_file import read_settings

        settings = read_settings(arguments.config)
        print(make_admin_key(settings))
        print(registered_in(settings), file=sys.stderr)  # not where $(polylora keygen --admin) reads
        return 0
    from app.engine.adapters.signing.signing import new_private_key, public_key

    print(public_key(new_private_key(arguments.key)))
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    from app.engine.adapters.signing.signing import public_key, read_private_key, sign, signature_path

    key = read_private_key(arguments.key)
    spec = base_spec_of(arguments)
    digest = read_adapter(arguments.source, spec, supported_features=FEATURES).card.digest
    path = signature_path(arguments.source)
    path.write_text(sign(digest, key))
    print(f"wrote {path}: {digest[:12]} on '{spec.name}', signed by {public_key(key)}")
    return 0
