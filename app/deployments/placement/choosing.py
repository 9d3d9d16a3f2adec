"""Which policy the configuration names, and where a request goes by its answer.

In: `placement.policy` and `placement.policy_options`. Out: the policy; for one request, a replica. Rule: a name without
a dot is a file of `policies/`, with the class `Policy` in it; anything else is the dotted path of a class. So a new
policy is one file.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Collection, Sequence
from typing import cast

from pydantic import ValidationError

from app.config import PlacementConfig
from app.deployments.placement import policies
from app.deployments.placement.policy import PlacementPolicy, less_loaded
from app.deployments.placement.view import PlacementView, UsableFleet
from app.dotted import import_dotted
from app.engine.errors import ConfigError


def make_policy(config: PlacementConfig) -> PlacementPolicy:
    """Raises ConfigError if there is no such policy, or it does not have these options."""
    kind = _find(config.policy)
    try:
        options = kind.Options.model_validate(dict(config.policy_options))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"placement.policy_options of {config.policy!r}: {wrong}") from None
    return kind(options)


def choose(
    digest: str | None,
    view: PlacementView,
    policy: PlacementPolicy,
    usable: Collection[str],
    anywhere: Sequence[str],
    load: Callable[[str], int],
    draw: random.Random,
) -> str:
    """The replica for one request, by the digest of its adapter (None: the base). usable and anywhere: not empty."""
    candidates: Sequence[str] = ()
    if digest is not None:
        candidates = [home for home in view.homes(digest) if home in usable]
        if not candidates:  # a home that cannot be used counts as lost
            candidates = policy.homes(digest, UsableFleet(view, usable, load))
    return less_loaded(candidates or anywhere, load, draw)


def _find(name: str) -> type[PlacementPolicy]:
    names = sorted(module.name for module in pkgutil.iter_modules(policies.__path__))
    if "." not in name and ":" not in name:
        if name not in names:
            raise ConfigError(
                f"placement.policy {name!r} is none of {', '.join(names)}; "
                "a policy of your own is named by the dotted path of its class"
            )
        kind = importlib.import_module(f"{policies.__name__}.{name}").Policy
    else:
        kind = import_dotted(name, "placement.policy")
    if not all(hasattr(kind, part) for part in ("Options", "has_homes", "homes")):
        raise ConfigError(f"placement.policy {name!r} is no policy: it needs Options, has_homes and homes")
    return cast(type[PlacementPolicy], kind)
