"""Which addresses a download may connect to.

A public name must have a public address: its owner may point it at whatever this machine reaches, at any time. A name
that only a private network has, or an address, may be private where the operator named it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from typing import Any

from app.engine.errors import SourceError

#: Option of `adapters.url_options` for http, https and oci: whether names may have addresses of a private network.
ALLOW_PRIVATE = "allow_private_addresses"
#: Names that only a private network has.
_PRIVATE_NAME = re.compile(r"[^.]+|.+\.(localhost|local|internal|lan|home\.arpa|svc)", re.IGNORECASE)


def public_socket(found: Any, scheme: str = "https") -> socket.socket:
    """A socket for one result of `getaddrinfo`. Raises SourceError for an address that is not public; `scheme` is that
    of the option that allows it.
    """
    family, kind, protocol, _, place = found
    address = ipaddress.ip_address(place[0].partition("%")[0])
    if not (getattr(address, "ipv4_mapped", None) or address).is_global:
        raise SourceError(
            f"its address {address} is not public; if that is intended, set adapters.url_options: "
            f"{{{scheme}: {{{ALLOW_PRIVATE}: true}}}}"
        )
    return socket.socket(family, kind, protocol)


def is_private_name(host: str) -> bool:
    """Whether the name itself says that the host is on a private network: an address, or a name of none other."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return _PRIVATE_NAME.fullmatch(host) is not None
