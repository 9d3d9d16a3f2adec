"""A combination of adapters: the parts, their weights and the method, with a digest of its own.

Equal contents, weights and methods are one adapter, whatever the names and their order. `combine` does the arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer
from app.engine.adapters.card import AdapterRef
from app.engine.errors import CombinationError, InvalidRequest

#: PEFT's combination types (`add_weighted_adapter`).
Method = Literal[
    "cat",
    "linear",
    "svd",
    "ties",
    "ties_svd",
    "dare_ties",
    "dare_linear",
    "dare_ties_svd",
    "dare_linear_svd",
    "magnitude_prune",
    "magnitude_prune_svd",
]
MajoritySign = Literal["total", "frequency"]
METHODS: tuple[Method, ...] = get_args(Method)
#: Adapters in one combination.
MAX_PARTS = 16
#: Prefix of a derived adapter's source; clients may not use it.
SCHEME = "combination:"

_DOMAIN = b"polylora/combination/v1"


class CombinationPart(NamedTuple):
    """One adapter and its weight."""

    ref: AdapterRef
    weight: float


@dataclass(frozen=True, slots=True)
class CombinationMethod:
    """How parts are combined. A field that the method does not use is None.

    density: the fraction of values that pruning keeps. svd_rank: None means the largest rank of any module of the parts
    (PEFT takes the largest rank in a configuration, even if no module has it). seed: for the values that `dare` drops.
    """

    name: Method = "cat"
    density: float | None = None
    svd_rank: int | None = None
    majority_sign: MajoritySign | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a field that is missing, or that the method does not use."""
        prunes = any(word in self.name for word in ("ties", "dare", "magnitude_prune"))
        if prunes and self.density is None:
            raise InvalidRequest(f"method {self.name!r} needs a density, from 0 to 1", param="density")
        uses = {
            "density": prunes,
            "svd_rank": self.name.endswith("svd"),
            "majority_sign": "ties" in self.name,
            "seed": "dare" in self.name,
        }
        for field, is_used in uses.items():
            if not is_used and getattr(self, field) is not None:
                raise InvalidRequest(f"method {self.name!r} has no use for {field}; leave it out", param=field)


@dataclass(frozen=True, slots=True)
class Combination:
    """Parts, ordered by digest."""

    parts: tuple[CombinationPart, ...]
    method: CombinationMethod = CombinationMethod()

    @property
    def digest(self) -> str:
        """Hex SHA-256 of everything that changes the result."""
        digest = hashlib.sha256(_DOMAIN)
        method = {name: value for name, value in asdict(self.method).items() if value is not None}
        fields = [json.dumps(method, sort_keys=True)]
        fields += [text for part in self.parts for text in (part.ref.digest, float(part.weight + 0.0).hex())]
        for field in fields:
            digest.update(len(field).to_bytes(8, "little") + field.encode())
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """For people: "sql*0.7+tone*0.3"."""
        return "+".join(f"{part.ref.name}*{part.weight:g}" for part in self.parts)

    @property
    def source(self) -> str:
        """The source from which the store can make the adapter again."""
        parts = [
            {"name": ref.name, "digest": ref.digest, "tenant": ref.tenant_id, "generation": ref.generation}
            | {"uri": ref.uri, "weight": weight}
            for ref, weight in self.parts
        ]
        return SCHEME + json.dumps({"method": asdict(self.method), "parts": parts}, separators=(",", ":"))

    def ref(self, tenant_id: str) -> AdapterRef:
        """A tenant's reference to the derived adapter; a single part of weight 1 is that part itself."""
        if len(self.parts) == 1 and self.parts[0].weight == 1.0:
            return self.parts[0].ref
        return AdapterRef(self.name, self.digest, tenant_id, uri=self.source)


def make_combination(parts: Sequence[CombinationPart], method: CombinationMethod = CombinationMethod()) -> Combination:
    """Raises InvalidRequest for no or too many parts, a repeated part, a non-finite weight, only weights of 0, or
    pruning a single part.

    PEFT computes "linear" for a single adapter, whatever the method.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise InvalidRequest(f"{len(parts)} adapters are named; from 1 to {MAX_PARTS} are combined", param="adapters")
    if len(parts) == 1 and method.density is not None:
        raise InvalidRequest(f"method {method.name!r} combines several adapters; name another one", param="method")
    if not any(part.weight for part in parts):
        raise InvalidRequest("all weights are 0, which leaves the base model; name it instead", param="adapters")
    names = [part.ref.name for part in parts]
    for part in parts:
        if not math.isfinite(part.weight):
            raise InvalidRequest(f"adapter {part.ref.name!r} has weight {part.weight}; give a number", param="adapters")
        if names.count(part.ref.name) > 1:
            raise InvalidRequest(f"adapter {part.ref.name!r} is named twice; add its weights", param="adapters")
    return Combination(tuple(sorted(parts, key=lambda part: (part.ref.digest, part.weight))), method)


def common_text(names: Sequence[str], texts: Sequence[str]) -> str:
    """The text settings (`AdapterCard.text`) of all these adapters, without generation defaults, which belong to each
    alone. Raises CombinationError if they differ.
    """
    first, *others = (cached_adapter_tokenizer(text).without_sampling() for text in texts)
    if any(other != first for other in others):
        raise CombinationError(
            f"adapters {', '.join(names)} write prompts or end answers differently: their chat templates, special "
            "tokens or end-of-sequence tokens are not the same; combine adapters with the same"
        )
    return first.to_json()


def is_combination(source: str) -> bool:
    """Whether a source is a derived adapter's."""
    return source.startswith(SCHEME)


def parse_combination(source: str) -> Combination:
    """The opposite of `Combination.source`."""
    fields: Mapping[str, Any] = json.loads(source.removeprefix(SCHEME))
    parts = [
        CombinationPart(
            AdapterRef(part["name"], part["digest"], part["tenant"], part["generation"], part["uri"]), part["weight"]
        )
        for part in fields["parts"]
    ]
    return Combination(tuple(parts), CombinationMethod(**fields["method"]))


def original_sources(source: str) -> list[str]:
    """The sources that a source is read from: those of a derived adapter's parts, which may be derived; else itself."""
    if not is_combination(source):
        return [source]
    return [each for part in parse_combination(source).parts for each in original_sources(part.ref.uri)]


def display_source(source: str) -> str:
    """A source as shown to people: for a derived adapter its method and parts, without the parts' locations."""
    if not is_combination(source):
        return source
    combination = parse_combination(source)
    return f"{combination.method.name}({combination.name})"
