"""Which calls and messages the processes of a service understand: one number.

In: nothing. Out: `PROTOCOL`. It is part of the names of actors and of the handshake of links, so that processes which
do not understand each other never talk. Two releases with one number work side by side during an upgrade: their
messages travel by the names of their fields (`app.engine.message`). Rule: raise it when a call or a message changes in
a way that `tests/deployments/links/test_messages.py` refuses, or when the meaning of a field changes.
"""

from __future__ import annotations

PROTOCOL = 1
