"""Why a service does not start, as one line out of what Ray and Serve say."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.haproxy_supervisor import Supervisor
from app.cli.startup import MAX_HA_PROXY_FAILURES, StartError, check_ha_proxy, reason_in

#: As Serve says that an ingress's constructor failed, shortened in its middle.
CONSTRUCTOR = """Deploying app 'polylora' failed: ...
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor or initial health
check failing. See controller logs for details. Error:
ray::ServeReplica:polylora:Ingress.initialize_and_get_metadata() (pid=7, ip=10.0.0.2, repr=<...>)
  File "/x/python3.12/concurrent/futures/_base.py", line 449, in result
  File "/x/ray/serve/_private/replica.py", line 1198, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/x/app/deployments/ingress/deployment.py", line 88, in __init__
    await store.preload()
app.engine.errors.AdapterMismatch: adapter 'x' is for another base; register it with that one
"""
ACTOR = """The actor died because of an error raised in its creation task, ray::AdapterStoreActor.__init__() (pid=8)
  File "/x/app/deployments/registry/db/database.py", line 55, in open
app.engine.errors.ConfigError: cannot open the registry: Permission denied: /x
"""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (CONSTRUCTOR, "adapter 'x' is for another base; register it with that one"),
        (ACTOR, "cannot open the registry: Permission denied: /x"),
        ("RuntimeError: the GCS did not come up", "the GCS did not come up"),
        ("Deployment X does not exist.\nAvailable: Y", "Deployment X does not exist."),
        ("", "Serve gives no reason"),
    ],
)
def test_the_reason_is_the_last_exception_that_tells_of_itself(words: str, reason: str) -> None:
    assert reason_in(words) == reason


def test_a_ha_proxy_that_ends_again_and_again_ends_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor("haproxy", [], tmp_path / "1.cfg", tmp_path / "admin.sock", "haproxy.cfg")
    for _ in range(MAX_HA_PROXY_FAILURES):
        check_ha_proxy(tmp_path)
        supervisor._note(1)
    with pytest.raises(StartError, match="HAProxy exits repeatedly: its exit status is 1"):
        check_ha_proxy(tmp_path)
