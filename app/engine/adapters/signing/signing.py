"""ed25519 signatures over adapters' digests.

A signature is one line beside the adapter (`adapter.sig` in a folder, `NAME.lora.arrow.sig` beside a card): `ed25519
PUBLIC_KEY SIGNATURE`, both in base64. A signature that does not match the contents is always an error; whether one is
required is up to `TrustedKeys`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from app.engine.adapters.bounded_files import read_bounded
from app.engine.adapters.signing.trusted_keys import SIGNATURE_NAME, SIGNATURE_SUFFIX
from app.engine.errors import AdapterUntrusted, ConfigError

_DOMAIN = b"polylora/signature/v1\0"
_LINE = re.compile(rb"ed25519 ([A-Za-z0-9+/]{43}=) ([A-Za-z0-9+/]{86}==)\n?")
_MAX_BYTES = 1024


def signature_path(adapter: Path) -> Path:
    """The signature file of a folder or card."""
    return adapter / SIGNATURE_NAME if adapter.is_dir() else adapter.with_name(adapter.name + SIGNATURE_SUFFIX)


def sign(digest: str, key: Ed25519PrivateKey) -> str:
    """The signature line for contents with this digest."""
    return f"ed25519 {public_key(key)} {_text(key.sign(_message(digest)))}\n"


def signer_of(adapter: Path, digest: str) -> str | None:
    """The public key that signed these contents, or None. AdapterUntrusted if the signature does not match them."""
    path = signature_path(adapter)
    if not os.path.lexists(path):
        return None
    match = _LINE.fullmatch(read_bounded(path, _MAX_BYTES))
    if match is None:
        raise AdapterUntrusted(f"'{path.name}' is not a signature; `polylora sign` writes one")
    key, signature = (base64.b64decode(part) for part in match.groups())
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _message(digest))
    except (InvalidSignature, ValueError):
        raise AdapterUntrusted(
            f"'{path.name}' does not fit the contents (digest {digest[:12]}): the adapter was altered, "
            "or signed for another base model"
        ) from None
    return _text(key)


def public_key(key: Ed25519PrivateKey) -> str:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return _text(raw)


def new_private_key(path: Path) -> Ed25519PrivateKey:
    """A new key, written to `path` with mode 0600. ConfigError if the file exists."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write a new key to {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return key


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key in `path`; ConfigError if there is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, binascii.Error) as error:
        raise ConfigError(f"no private key in {path}: {error}; `polylora keygen` makes one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the key in {path} is not an ed25519 key; `polylora keygen` makes one")
    return key


def _message(digest: str) -> bytes:
    return _DOMAIN + bytes.fromhex(digest)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
