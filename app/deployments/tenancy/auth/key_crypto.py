"""API keys, the salts that separate tenants' KV blocks, and the encryption of tenants' own secrets.

A key is shown once, to its creator; elsewhere only its SHA-256 and a few letters exist. 32 random bytes cannot be
guessed, so a plain hash is enough; a slow password hash would cost every request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from app.config import DIGEST, SECRETS_KEY
from app.engine.errors import ConfigError, InvalidRequest, NotReady

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Prefixes of our keys.
PROJECT_PREFIX = "sk-poly-"
ADMIN_PREFIX = "sk-admin-poly-"

#: Of an admin key or management token that the operator chose.
MIN_SECRET_BITS = 128

_KEY_BYTES = 32
_SECRET = re.compile(r"sk-(admin-)?poly-[A-Za-z0-9_-]{43}")
#: As many bytes as a block hash needs.
_SALT_BYTES = 16
_NONCE_BYTES = 12


class NewKey(NamedTuple):
    """A new key. `value` goes to its creator and is not stored."""

    value: str
    digest: str
    redacted: str


def new_key(*, is_admin: bool) -> NewKey:
    """32 random bytes in letters that need no escaping."""
    value = (ADMIN_PREFIX if is_admin else PROJECT_PREFIX) + secrets.token_urlsafe(_KEY_BYTES)
    return NewKey(value, key_digest(value), redact_key(value))


def key_digest(value: str) -> str:
    """The SHA-256 in hexadecimal digits, by which a key is stored and looked up."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def redact_key(value: str) -> str:
    """The prefix and the last four letters, for people to distinguish keys."""
    prefix = ADMIN_PREFIX if value.startswith(ADMIN_PREFIX) else PROJECT_PREFIX
    return f"{value[: len(prefix) + 2]}...{value[-4:]}"


def is_key(value: str) -> bool:
    """Whether the text has the form of our keys."""
    return _SECRET.fullmatch(value) is not None


def is_unguessable(secret: str) -> bool:
    """Whether a random secret of this length and alphabet has 128 bits, and this one looks random.

    Only letters and digits count: 4 bits each if all are hexadecimal digits of one case, 5.17 if there is one case of
    letters, else 5.95.
    """
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        return False  # no header could carry it
    letters = re.sub("[^A-Za-z0-9]", "", secret)
    has_one_case = letters in (letters.lower(), letters.upper())
    alphabet = 16 if has_one_case and re.fullmatch("[0-9A-Fa-f]*", letters) else 36 if has_one_case else 62
    is_repeated = letters in (letters + letters)[1:-1]
    return len(letters) * math.log2(alphabet) >= MIN_SECRET_BITS and len(set(letters)) >= 8 and not is_repeated


def environment_digest(environ: Mapping[str, str], name: str) -> str | None:
    """The SHA-256 of an admin key or management token in the environment, given as the secret or as its SHA-256.

    Raises ConfigError for a secret that could be guessed, and for a malformed SHA-256.
    """
    if secret := environ.get(name):
        if not is_unguessable(secret):
            raise ConfigError(
                f"{name} could be guessed; take 32 random bytes: openssl rand -hex 32, or polylora create-admin-key"
            )
        return key_digest(secret)
    digest = environ.get(f"{name}{DIGEST}", "")
    if digest and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError(
            f"{name}{DIGEST} is not 64 hexadecimal digits; compute them with `printf %s SECRET | sha256sum`"
        )
    return digest or None


def derived_salt(secret: bytes, version: int) -> bytes:
    """A tenant's salt: HMAC-SHA256 of its secret over the salt's version, 16 bytes.

    KV blocks of different salts are never shared. A tenant does not know its salt, and no request can name one.
    """
    return hmac.digest(secret, b"polylora kv salt %d" % version, "sha256")[:_SALT_BYTES]


class SecretCipher:
    """Encrypts secrets that are stored: AES-256-GCM by a key derived from `POLYLORA_SECRETS_KEY`.

    `context` says whose secret it is, so that no row can take another row's.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigError for a key that could be guessed."""
        secret = environ.get(SECRETS_KEY)
        if secret and not is_unguessable(secret):
            raise ConfigError(f"{SECRETS_KEY} could be guessed; take 32 random bytes: openssl rand -hex 32")
        self._cipher: AESGCM | None = None
        if secret:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # heavy, and few services encrypt

            self._cipher = AESGCM(hmac.digest(secret.encode(), b"polylora secrets", "sha256"))

    def encrypt(self, value: str, context: str) -> str:
        """Raises InvalidRequest if there is no key."""
        if self._cipher is None:
            raise InvalidRequest(f"this service stores no secrets of projects: {SECRETS_KEY} is not set for its store")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, value.encode(), context.encode())).decode()

    def decrypt(self, text: str, context: str) -> str:
        """Raises NotReady if this key is not the one that it was encrypted by."""
        from cryptography.exceptions import InvalidTag

        sealed = base64.b64decode(text)
        try:
            if self._cipher is None:
                raise InvalidTag
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context.encode()).decode()
        except InvalidTag as error:
            raise NotReady(
                f"a stored secret of {context} cannot be decrypted: {SECRETS_KEY} is missing or has changed; "
                "restore it, or set the secret again"
            ) from error
