"""Which policy the configuration names, and where a request goes by its answer.

In: `placement.policy` and `placement.policy_options`. Out: the policy; for one request, a replica. Rule: a name without
a dot is a file of `policies/`, with the class `Policy` in it; anything else is the dotted path of a class. So a new
policy is one file. Of the replicas that a policy allows, one that has what the prompt begins with cached is preferred,
as long as it has not much more to do than the one that would be taken otherwise.
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

#: A replica that has a prompt's head cached may have so many times the requests of the one that would be taken
#: otherwise, or so many more.
HEAD_FACTOR, HEAD_MARGIN = 1.5, 4


def no_prefix() -> str | None:
    """For requests of which no prompt is looked at."""
    return None


def make_policy(config: PlacementConfig) -> PlacementPolicy:
    """Raises ConfigError if there is no such policy, or it does not have these options."""
    kind = _find(config.policy)
    try:
        options = kind.Options.model_validate(dict(config.policy_options))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"placement.policy_options of {config.policy!r}: {wrong}") from None
    return kind(options)


def choose_replica(
    digest: str | None,
    view: PlacementView,
    policy: PlacementPolicy,
    usable: Collection[str],
    anywhere: Sequence[str],
    load: Callable[[str], int],
    draw: random.Random,
    head: Callable[[], str | None] = no_prefix,
) -> str:
    """The replica for one request, by the digest of its adapter (None: the base). usable and anywhere: not empty.

    `head` names what its prompt begins with (`prefix_key`); it is asked only if that can make a difference.
    """
    candidates: Sequence[str] = ()
    if digest is not None:
        candidates = [home for home in view.homes(digest) if home in usable]
        if not candidates:  # a home that cannot be used counts as lost
            candidates = policy.homes(digest, UsableFleet(view, usable, load))
    chosen = less_loaded(candidates or anywhere, load, draw)
    if view.has_heads and len(candidates or anywhere) > 1 and (name := head()) is not None:
        return _with_head(name, chosen, view, candidates or usable, load, draw)
    return chosen


def _with_head(
    name: str,
    chosen: str,
    view: PlacementView,
    candidates: Collection[str],
    load: Callable[[str], int],
    draw: random.Random,
) -> str:
    """Of two candidates that have the head cached the less loaded, within the bound; else what was chosen."""
    holders = view.with_head(name)
    drawn = holders if len(holders) < 3 else draw.sample(holders, 2)
    there = [each for each in drawn if each in candidates]
    if not there:
        return chosen
    nearest, limit = less_loaded(there, load, draw), load(chosen)
    return nearest if load(nearest) <= max(HEAD_FACTOR * limit, limit + HEAD_MARGIN) else chosen


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
