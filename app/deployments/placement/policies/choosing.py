"""Which policy the configuration names.

In: `placement.policy` and its options. Out: the policy. A new policy is a file beside this one and a line here.
"""

from __future__ import annotations

from app.config import PlacementConfig
from app.deployments.placement.policies.least_loaded import LeastLoadedPolicy
from app.deployments.placement.policies.policy import PlacementPolicy
from app.deployments.placement.policies.sticky import StickyPolicy


def make_policy(config: PlacementConfig) -> PlacementPolicy:
    return StickyPolicy(config.load_bound) if config.policy == "sticky" else LeastLoadedPolicy()
