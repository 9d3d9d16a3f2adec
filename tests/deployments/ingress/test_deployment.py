"""What the ingress does by itself, without a cluster: it is handed new limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_new_limits_are_those_of_requests_and_of_waiting_for_replicas() -> None:
    code = """if True:
        from types import SimpleNamespace
        from app.config import AppConfig
        from app.deployments.ingress.deployment import Ingress
        config = AppConfig.model_validate({"limits": {"max_sequences": 7}})
        ingress = SimpleNamespace(
            _config=config, _assigner=SimpleNamespace(), frontend=SimpleNamespace(limits=config.limits)
        )
        Ingress.reconfigure(ingress, {"replica_wait_s": 2.5, "max_logprobs": 3})
        assert ingress._assigner.replica_wait_s == 2.5
        assert (ingress.frontend.limits.max_sequences, ingress.frontend.limits.max_logprobs) == (7, 3)
        try:
            Ingress.reconfigure(ingress, {"replica_wait_s": "soon"})
        except ValueError:
            assert ingress._assigner.replica_wait_s == 2.5
        else:
            raise AssertionError("it is no number")
    """
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
