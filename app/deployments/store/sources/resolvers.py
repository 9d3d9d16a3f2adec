"""Resolvers: where an unregistered adapter may be, by its name.

A resolver is a template with `{name}` in it (a path or a URI), an operator's function, or a class with vLLM's interface
for resolvers. A name fills parts of a path and cannot leave them (`app.model_names`). A project gets only local folders
below its own `<project id>/`, and nothing outside of the roots is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.config import AdaptersConfig
from app.deployments.registry.jobs.auto_registration import Resolver
from app.deployments.registry.models import DEFAULT_TENANT, check_source, lacks_oci_version
from app.engine.adapters.combining.combination import is_combination
from app.engine.adapters.formats.arrow import CARD_SUFFIX
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.errors import ConfigError, InvalidRequest, NotFound, PolyloraError, SourceError, UnsafeSource
from app.import_path import construct, import_dotted
from app.model_names import is_name

logger = logging.getLogger(__name__)

#: (name, tenant id) -> source or None.
Resolve = Callable[[str, str], str | None]


def open_resolvers(config: AdaptersConfig, base_name: str = "") -> tuple[Resolver, ...]:
    """The resolvers of `adapters.resolvers`, in their order. Raises ConfigError for an invalid one."""
    roots = [Path(root) for root in config.roots]
    return tuple(
        TemplateResolver(text, roots) if "{name}" in text else FunctionResolver(text, roots, base_name)
        for text in config.resolvers or ()
    )


class TemplateResolver:
    """Replaces `{name}` by the adapter's name and `{tenant}` by the tenant's id.

    A path without `{tenant}` has a project's adapters in the project's own folder, `<project id>/<name>`.
    """

    def __init__(self, template: str, roots: Sequence[Path]) -> None:
        if template.startswith("hf://") and "@" not in template:
            raise ConfigError(f"adapters.resolvers: {template!r} has no revision; write {template}@main, or a commit")
        if lacks_oci_version(template):
            raise ConfigError(f"adapters.resolvers: {template!r} has no tag; write {template}:latest, or another")
        self._template = template
        self._roots = roots

    def source(self, name: str, tenant_id: str) -> str | None:
        if not is_name(name):
            return None
        is_local = "://" not in self._template
        if is_local and "{tenant}" not in self._template and tenant_id != DEFAULT_TENANT:
            name = f"{tenant_id}/{name}"
        source = self._template.replace("{tenant}", tenant_id).replace("{name}", name)
        return source if not is_local or _is_adapter(source, self._roots) else None


class FunctionResolver:
    """An operator's function, or vLLM's LoRAResolver, given by its dotted path."""

    def __init__(self, dotted_path: str, roots: Sequence[Path], base_name: str = "") -> None:
        self._dotted_path = dotted_path
        self._resolve = _load(dotted_path, base_name)
        self._roots = roots

    def source(self, name: str, tenant_id: str) -> str | None:
        try:
            source = self._resolve(name, tenant_id)
        except PolyloraError:
            raise
        except BaseException as error:
            # Foreign code in our thread: whatever it raises is this source's failure. SystemExit would end the event
            # loop that waits for the result.
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise SourceError(f"{self._dotted_path} cannot look for {name!r}: {reason}") from error
        if source is None:
            return None
        if not isinstance(source, str) or is_combination(source):
            raise SourceError(f"{self._dotted_path} must return a path, a URI or None for {name!r}")
        try:
            check_source(source)
        except (InvalidRequest, UnsafeSource) as error:
            raise SourceError(f"{self._dotted_path} returned no source for {name!r}: {error}") from error
        if "://" in source:
            return source
        if tenant_id != DEFAULT_TENANT and not source.startswith(f"{tenant_id}/"):
            logger.warning(
                "%s returned %r for %s, whose folders are below %s/", self._dotted_path, source, name, tenant_id
            )
            return None
        return source if _is_adapter(source, self._roots) else None


def _is_adapter(path: str, roots: Sequence[Path]) -> bool:
    """Whether there is a card, or a folder with an adapter's configuration, under the roots."""
    try:
        found = resolve_adapter_path(path, roots)
    except NotFound:
        return False
    except UnsafeSource as error:
        logger.warning("a resolver's path is refused: %s", error)
        return False
    if found.is_dir():
        return (found / CONFIG_NAME).is_file()
    return found.name.endswith(CARD_SUFFIX)


def _load(dotted_path: str, base_name: str) -> Resolve:
    resolve: Resolve = import_dotted(dotted_path, "adapters.resolvers")
    if isinstance(resolve, type) and callable(getattr(resolve, "resolve_lora", None)):
        return _vllm_resolver(dotted_path, resolve, base_name)
    if not callable(resolve):
        raise ConfigError(f"adapters.resolvers {dotted_path!r} is not a function of (name, tenant_id)")
    return resolve


def _vllm_resolver(dotted_path: str, kind: Callable[[], Any], base_name: str) -> Resolve:
    """vLLM's interface: `async resolve_lora(base_model_name, lora_name)`, whose result has `lora_path` or is None."""
    resolver = construct(kind, dotted_path, "adapters.resolvers")

    def resolve(name: str, tenant_id: str) -> str | None:
        if tenant_id != DEFAULT_TENANT:  # it knows no tenants, and what it finds would be everyone's
            return None
        found = asyncio.run(resolver.resolve_lora(base_name, name))
        return None if found is None else str(found.lora_path)

    return resolve
