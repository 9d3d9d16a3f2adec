"""Whose signature counts, for whom, and what the file is called that holds it.

In: the configured keys, a tenant, and who signed an adapter (`signing.signer_of`). Out: nothing, or
`AdapterUntrusted`. Checking that a signature fits the contents is left to `signing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.engine.errors import AdapterUntrusted

#: A raw ed25519 public key in base64.
PUBLIC_KEY_PATTERN = r"^[A-Za-z0-9+/]{43}=$"


class TrustedKeys(NamedTuple):
    """Public keys by tenant, and whether every adapter must bear one's signature."""

    required: bool = False
    keys: Mapping[str, Sequence[str]] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether signatures are looked at at all."""
        return self.required or bool(self.keys)

    def check(self, tenant_id: str, signer: str | None, what: str) -> None:
        """AdapterUntrusted if this tenant may not register what `signer` (None: nobody) signed."""
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
