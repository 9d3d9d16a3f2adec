"""The configured placement policy, and the replica for one request.

A policy name without a dot is a file of `policies/` with a class `Policy`; otherwise it is the dotted path of a class.
Among the replicas that the policy allows, one that has the prompt's prefix cached is preferred unless it is much more
loaded than the one that would be taken otherwise.
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
from app.engine.errors import ConfigError
from app.import_path import import_dotted

#: A replica with the cached prefix may have this many times the requests of the other, or this many more.
PREFIX_LOAD_FACTOR, PREFIX_LOAD_MARGIN = 1.5, 4


def no_prefix() -> str | None:
    """No prompt prefix is considered."""
    return None


def make_policy(config: PlacementConfig) -> PlacementPolicy:
    """The policy with its options. Raises ConfigError for an unknown policy or invalid options."""
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
    prefix: Callable[[], str | None] = no_prefix,
) -> str:
    """The replica for one request. digest: its adapter's, None for the base. usable and anywhere must not be empty.

    `prefix` returns the hash of the prompt's prefix (`prefix_key`); it is called only if that can make a difference.
    """
    candidates: Sequence[str] = ()
    if digest is not None:
        candidates = [each for each in view.assigned_replicas(digest) if each in usable]
        if not candidates:  # a replica that cannot be used counts as lost
            candidates = policy.assign(digest, UsableFleet(view, usable, load))
    chosen = less_loaded(candidates or anywhere, load, draw)
    if view.has_prefixes and len(candidates or anywhere) > 1 and (name := prefix()) is not None:
        return _prefer_cached(name, chosen, view, candidates or usable, load, draw)
    return chosen


def _prefer_cached(
    name: str,
    chosen: str,
    view: PlacementView,
    candidates: Collection[str],
    load: Callable[[str], int],
    draw: random.Random,
) -> str:
    """The less loaded of two candidates that have the prefix cached, if within the bound; else `chosen`."""
    cached_on = view.replicas_with_prefix(name)
    drawn = cached_on if len(cached_on) < 3 else draw.sample(cached_on, 2)
    there = [each for each in drawn if each in candidates]
    if not there:
        return chosen
    nearest, limit = less_loaded(there, load, draw), load(chosen)
    return nearest if load(nearest) <= max(PREFIX_LOAD_FACTOR * limit, limit + PREFIX_LOAD_MARGIN) else chosen


def _find(name: str) -> type[PlacementPolicy]:
    names = sorted(module.name for module in pkgutil.iter_modules(policies.__path__))
    if "." not in name and ":" not in name:
        if name not in names:
            raise ConfigError(
                f"placement.policy {name!r} is not one of {', '.join(names)}; "
                "name a policy of your own by the dotted path of its class"
            )
        kind = importlib.import_module(f"{policies.__name__}.{name}").Policy
    else:
        kind = import_dotted(name, "placement.policy")
    if not all(hasattr(kind, part) for part in ("Options", "has_affinity", "assign")):
        raise ConfigError(f"placement.policy {name!r} is not a policy: it needs Options, has_affinity and assign")
    return cast(type[PlacementPolicy], kind)
