"""The secrets of tenants: API keys, and the salts that part their KV blocks.

In: random bytes. Out: keys as clients send them, what is stored of them, and salts. Rule: a key is told once, to
whoever made it; everywhere else only its SHA-256 and a few of its letters exist. 32 random bytes cannot be guessed, so
a plain hash keeps them; a slow one, made for passwords, would cost every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from app.config import ADMIN_KEY, DIGEST
from app.engine.errors import ConfigError

#: How keys begin. What begins otherwise is no key of ours.
PROJECT_PREFIX = "sk-poly-"
ADMIN_PREFIX = "sk-admin-poly-"

_KEY_BYTES = 32
_SECRET = re.compile(r"sk-(admin-)?poly-[A-Za-z0-9_-]{43}")
#: Bytes of a salt: as many as a block's hash needs.
_SALT_BYTES = 16


class NewKey(NamedTuple):
    """A key that was made a moment ago. `value` is told to whoever asked for it, and forgotten."""

    value: str
    digest: str
    redacted: str


def new_key(*, is_admin: bool) -> NewKey:
    """32 random bytes, written with letters that need no escaping."""
    value = (ADMIN_PREFIX if is_admin else PROJECT_PREFIX) + secrets.token_urlsafe(_KEY_BYTES)
    return NewKey(value, key_digest(value), redact_key(value))


def key_digest(value: str) -> str:
    """What is stored of a key and looked up: its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def redact_key(value: str) -> str:
    """The beginning and the last four letters, for people to tell keys apart."""
    prefix = ADMIN_PREFIX if value.startswith(ADMIN_PREFIX) else PROJECT_PREFIX
    return f"{value[: len(prefix) + 2]}...{value[-4:]}"


def is_key(value: str) -> bool:
    """Whether this is written as our keys are."""
    return _SECRET.fullmatch(value) is not None


def environment_digest(environ: Mapping[str, str], name: str) -> str | None:
    """The SHA-256 of the admin key or the management token of an environment, which may hold that alone.

    Raises ConfigError for an admin key, or a SHA-256, that is not written as one.
    """
    if secret := environ.get(name):
        if name == ADMIN_KEY and not is_key(secret):
            raise ConfigError(f"{ADMIN_KEY} is not written as a key; polylora keygen --admin makes one")
        return key_digest(secret)
    digest = environ.get(f"{name}{DIGEST}", "")
    if digest and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError(f"{name}{DIGEST} is not 64 digits of 0-9a-f, as `printf %s SECRET | sha256sum` writes them")
    return digest or None


def derived_salt(secret: bytes, version: int) -> bytes:
    """A tenant's salt: HMAC-SHA256 of its secret over the salt's version, 16 bytes.

    KV blocks of different salts are never shared. A tenant does not know its own, and no request can name one.
    """
    return hmac.digest(secret, b"polylora kv salt %d" % version, "sha256")[:_SALT_BYTES]
