"""The protocol number of calls and messages between a service's processes.

It is part of actors' names and of the links' handshake, so processes with different numbers never talk. Two releases
with the same number work side by side during an upgrade. Raise it when a call, a message or the meaning of a field
changes, from the first release on.
"""

from __future__ import annotations

from app.deployments.rpc.transport import ReplicaUnreachable

PROTOCOL = 1


def check_protocol(protocol: int) -> None:
    """Raise ReplicaUnreachable for another protocol than ours."""
    if protocol != PROTOCOL:
        raise ReplicaUnreachable(
            f"the ingress speaks protocol {protocol} and the replica {PROTOCOL}: their releases do not work together; "
            "each uses processes of its own release until the others are replaced"
        )
