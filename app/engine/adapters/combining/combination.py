"""What a derived adapter is made of: the parts, their weights, and the method that combines them.

In: references to adapters, as a request or a registration names them. Out: a `Combination`: its digest, and the text
under which it travels as an adapter's source. Rule: equal contents, weights and methods are one adapter, whatever their
names and their order. The arithmetic is `combine`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from app.engine.adapters.card import AdapterRef
from app.engine.errors import InvalidRequest

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
#: Adapters in one composition.
MAX_PARTS = 16
#: How the source of a derived adapter begins; clients may not name such a source.
SCHEME = "compose:"

_DOMAIN = b"polylora/composition/v1"


class CombinationPart(NamedTuple):
    """One adapter and its factor."""

    ref: AdapterRef
    weight: float


@dataclass(frozen=True, slots=True)
class CombinationMethod:
    """How parts are combined. Fields beside the method are None where it has no use for them.

    density: the share of values that pruning keeps, from 0 to 1. svd_rank: None for the largest rank of
    any module of the parts (PEFT's is the largest that a configuration names, be it no module's). seed: of what `dare`
    drops.
    """

    method: Method = "cat"
    density: float | None = None
    svd_rank: int | None = None
    majority_sign: MajoritySign | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a field that is missing, or that the method has no use for."""
        prunes = any(word in self.method for word in ("ties", "dare", "magnitude_prune"))
        if prunes and self.density is None:
            raise InvalidRequest(f"method {self.method!r} needs a density, from 0 to 1", param="density")
        uses = {
            "density": prunes,
            "svd_rank": self.method.endswith("svd"),
            "majority_sign": "ties" in self.method,
            "seed": "dare" in self.method,
        }
        for name, is_used in uses.items():
            if not is_used and getattr(self, name) is not None:
                raise InvalidRequest(f"method {self.method!r} has no use for {name}; leave it out", param=name)


@dataclass(frozen=True, slots=True)
class Combination:
    """Parts in order of their digests."""

    parts: tuple[CombinationPart, ...]
    recipe: CombinationMethod = CombinationMethod()

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that changes the result."""
        digest = hashlib.sha256(_DOMAIN)
        recipe = {name: value for name, value in asdict(self.recipe).items() if value is not None}
        fields = [json.dumps(recipe, sort_keys=True)]
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
        """Where the store gets it from: everything that it takes to make it again."""
        parts = [
            {"name": ref.name, "digest": ref.digest, "tenant": ref.tenant_id, "generation": ref.generation}
            | {"uri": ref.uri, "weight": weight}
            for ref, weight in self.parts
        ]
        return SCHEME + json.dumps({"recipe": asdict(self.recipe), "parts": parts}, separators=(",", ":"))

    def ref(self, tenant_id: str) -> AdapterRef:
        """The derived adapter as a tenant's request has it; one part as it is, is that part."""
        if len(self.parts) == 1 and self.parts[0].weight == 1.0:
            return self.parts[0].ref
        return AdapterRef(self.name, self.digest, tenant_id, uri=self.source)


def make_combination(parts: Sequence[CombinationPart], recipe: CombinationMethod = CombinationMethod()) -> Combination:
    """Raises InvalidRequest for too many parts, none, one twice, a weight that is no number, or one part to prune.

    Of one adapter PEFT makes "linear", whatever it is asked for.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise InvalidRequest(f"{len(parts)} adapters are named; from 1 to {MAX_PARTS} are combined", param="adapters")
    if len(parts) == 1 and recipe.density is not None:
        raise InvalidRequest(f"method {recipe.method!r} combines several adapters; name another one", param="method")
    names = [part.ref.name for part in parts]
    for part in parts:
        if not math.isfinite(part.weight):
            raise InvalidRequest(f"adapter {part.ref.name!r} has weight {part.weight}; give a number", param="adapters")
        if names.count(part.ref.name) > 1:
            raise InvalidRequest(f"adapter {part.ref.name!r} is named twice; add its weights", param="adapters")
    return Combination(tuple(sorted(parts, key=lambda part: (part.ref.digest, part.weight))), recipe)


def is_combination(source: str) -> bool:
    """Whether a source is that of a derived adapter."""
    return source.startswith(SCHEME)


def parse_combination(source: str) -> Combination:
    """What `Combination.source` has written."""
    fields: Mapping[str, Any] = json.loads(source.removeprefix(SCHEME))
    parts = [
        CombinationPart(
            AdapterRef(part["name"], part["digest"], part["tenant"], part["generation"], part["uri"]), part["weight"]
        )
        for part in fields["parts"]
    ]
    return Combination(tuple(parts), CombinationMethod(**fields["recipe"]))


def display_source(source: str) -> str:
    """A source as people are shown it: of a derived adapter what it is made of, and no places of its parts."""
    if not is_combination(source):
        return source
    combination = parse_combination(source)
    return f"{combination.recipe.method}({combination.name})"
