"""Which calls and messages the processes of a service understand: one number.

In: nothing. Out: `PROTOCOL`, and the refusal of another. It is part of the names of actors and of the handshake of
links, so that processes which do not understand each other never talk. Two releases with one number work side by side
during an upgrade. Rule, from the first release on: raise it when a call, a message or the meaning of a field changes.
"""

from __future__ import annotations

from app.deployments.rpc.transport import ReplicaUnreachable

PROTOCOL = 1


def check_protocol(protocol: int) -> None:
    """Raise ReplicaUnreachable for another protocol than ours: whoever asked goes elsewhere, and nobody else does."""
    if protocol != PROTOCOL:
        raise ReplicaUnreachable(
            f"the ingress speaks protocol {protocol} and the replica {PROTOCOL}: they are of releases that do not work "
            "side by side; each goes on with those of its own until the others are replaced"
        )
