"""Which signers a tenant trusts, and the names of signature files. `signing` verifies the signatures themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.engine.errors import AdapterUntrusted

#: A raw ed25519 public key in base64.
PUBLIC_KEY_PATTERN = r"^[A-Za-z0-9+/]{43}=$"


class TrustedKeys(NamedTuple):
    """Public keys by tenant, and whether every adapter must have a trusted signature."""

    required: bool = False
    keys: Mapping[str, Sequence[str]] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether signatures are checked at all."""
        return self.required or bool(self.keys)

    def check(self, tenant_id: str, signer: str | None, what: str) -> None:
        """AdapterUntrusted if this tenant may not register what `signer` signed; None means unsigned."""
        if signer is None:
            if self.required:
                raise AdapterUntrusted(f"{what} is not signed and adapters.signing.required is set; `polylora sign` it")
        elif signer not in self.keys.get(tenant_id, ()):
            raise AdapterUntrusted(
                f"{what} is signed by {signer}, which is no trusted key of tenant {tenant_id!r}; "
                "add it to adapters.signing.trusted_keys, or have it signed by another"
            )


#: In a PEFT folder.
SIGNATURE_NAME = "adapter.sig"
#: After the name of a card.
SIGNATURE_SUFFIX = ".sig"
