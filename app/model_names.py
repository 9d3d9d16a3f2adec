"""Names of models: the base, adapters and aliases, and one version of a name.

A name is one part, or several with `/` between them as on hubs (`org/name`). After `@` a request may say which
contents it means: a generation (`org/name@3`) or the beginning of a digest (`org/name@3f9c2a71`, also
`@sha256:3f9c2a71`). A version is a condition: a name whose present contents are others is not found. What is registered
has a name without a version.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from app.engine.errors import InvalidRequest
from app.redaction import holds_key

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
#: Nothing that a path, a log or a header would need to escape, and no colon.
NAME_PATTERN = rf"^{_PART}(/{_PART})*$"
MAX_NAME_CHARS = 128
#: Last parts of routes below a name. A name of several parts may not end in one, so that every path has one meaning.
ROUTE_SUFFIXES = ("load", "generations", "weights", "versions", "promote", "rollback")
#: Beginning of projects' ids, which are folders' names below the roots, too.
PROJECT_PREFIX = "proj_"
#: Fewer digits of a digest could be a generation, and could be unique by accident only.
MIN_DIGEST_CHARS = 8
#: What words at a name's end may say about how the weights are stored, and about a quantisation such as q4-k-m.
_STORAGE = re.compile("gguf|hf|mlx|bnb|unsloth|awq|gptq|ud|[248]bit|int[48]|fp8|b?fp?16|fp?32|i?q[1-8]")
_QUANTIZATION, _QUANTIZATION_DETAIL = re.compile("i?q[1-8]"), re.compile("k|[01]|nl|x?x?[sml]|xl")
_VERSION = re.compile(
    rf"(?P<generation>[1-9][0-9]{{0,{MIN_DIGEST_CHARS - 2}}})"
    rf"|(?:sha256:)?(?P<digest>[0-9a-fA-F]{{{MIN_DIGEST_CHARS},64}})"
)


class ModelVersion(NamedTuple):
    """Which contents of a name are meant: a generation, or the beginning of a hex SHA-256 digest."""

    generation: int | None = None
    digest_prefix: str = ""

    def is_of(self, digest: str, generation: int | None = None) -> bool:
        """Whether contents are this version; the base model has no generation."""
        if self.generation is not None:
            return self.generation == generation
        return digest.startswith(self.digest_prefix)


def split_version(text: str) -> tuple[str, ModelVersion | None]:
    """A name and its version, None if it has none. What is no version stays a part of the name, which nothing has."""
    name, at, version = text.partition("@")
    found = _VERSION.fullmatch(version) if at else None
    if found is None:
        return text, None
    if found["generation"] is not None:
        return name, ModelVersion(generation=int(found["generation"]))
    return name, ModelVersion(digest_prefix=found["digest"].lower())


def name_problem(text: str) -> str | None:
    """Why the base, an adapter or an alias may not have this name, as the end of a sentence; None if it may."""
    if len(text) > MAX_NAME_CHARS or re.fullmatch(NAME_PATTERN, text) is None:
        return (
            f"must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or '-', beginning with a letter or digit; "
            "'/' may stand between such parts"
        )
    first, *_, last = text.split("/") if "/" in text else ("", "")
    if first.startswith(PROJECT_PREFIX):
        return f"must not have a first part that begins with {PROJECT_PREFIX!r}: those are projects' folders"
    if last in ROUTE_SUFFIXES:
        return f"must not end in '/{last}', which is a route of this API; choose another last part"
    return None


def is_name(text: str) -> bool:
    """Whether an adapter or alias may have this name; names appear in lists, metrics and logs."""
    return name_problem(text) is None and not holds_key(text)


def base_warning(trained_on: object, base_name: str, base_uri: str) -> str | None:
    """What to tell who loads an adapter whose configuration names another base model than the service has; None if the
    names agree or the adapter names none.

    Names and URIs are compared without organisation, folders, revision, separators and what says how weights are
    stored: `unsloth/Qwen3-0.6B-bnb-4bit` is `qwen3-0.6b`, and `Qwen3-0.6B-Base` is not.
    """
    if not isinstance(trained_on, str):
        return None
    if _plain_model_name(trained_on) in ("", _plain_model_name(base_name), _plain_model_name(base_uri)):
        return None
    return (
        f"the adapter names {trained_on[:160]!r} as the model that it was trained on, and this base model is "
        f"{base_name!r}; if these are two models, its answers are wrong"
    )


def _plain_model_name(name_or_uri: str) -> str:
    parts = name_or_uri.partition("#")[0].replace("\\", "/").rstrip("/").split("/")
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        last = parts[-3].rpartition("--")[2]  # in the cache of `huggingface_hub`, where the last folder is a commit
    else:
        last = parts[-1].partition("@")[0]
    words = re.sub("[^a-z0-9]+", "-", last.lower()).split("-")
    return "".join(words[: _num_name_words(words)])


def _num_name_words(words: list[str]) -> int:
    """How many words are the name, without those at the end that say how the weights are stored; at least 1."""
    end = len(words)
    while end > 1:
        if _STORAGE.fullmatch(words[end - 1]):
            end -= 1
            continue
        start = end
        while start > 1 and _QUANTIZATION_DETAIL.fullmatch(words[start - 1]):
            start -= 1
        if start == end or start < 2 or not _QUANTIZATION.fullmatch(words[start - 1]):
            break
        end = start - 1
    return end


def check_name(name: str) -> None:
    """Raises InvalidRequest for an invalid name of an adapter or alias."""
    if holds_key(name):
        raise InvalidRequest("an API key is given for a name; is it in the wrong place?", param="name")
    plain, version = split_version(name)
    if version is not None:
        raise InvalidRequest(
            f"{name[:80]!r} is a version of a name, which requests and aliases may name; here give the name, "
            f"{plain[:80]!r}, whatever it means",
            param="name",
        )
    if (problem := name_problem(name)) is not None:
        raise InvalidRequest(f"adapter name {name[:80]!r} {problem}", param="name")


def check_model_id(text: str) -> None:
    """Raises InvalidRequest for what cannot be a model in prices, limits and permissions: a name, for a project's own
    after its id and a colon.
    """
    owner_id, colon, name = text.partition(":")
    check_name(name if colon else text)
    if colon and not (is_name(owner_id) and owner_id.startswith(PROJECT_PREFIX)):
        raise InvalidRequest(f"{text[:80]!r} does not begin with a project's id before its colon", param="model")


def _valid_name(name: str) -> str:
    if (problem := name_problem(name)) is not None:
        raise ValueError(f"the name {name[:80]!r} {problem}")
    return name


def _valid_reference(name: str) -> str:
    _valid_name(split_version(name)[0])
    return name


def _valid_model_id(text: str) -> str:
    try:
        check_model_id(text)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return text


#: In files of settings: a name, one that may have a version, and a model of `check_model_id`.
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(_valid_name)]
NameReference = Annotated[str, AfterValidator(_valid_reference)]
ModelId = Annotated[str, AfterValidator(_valid_model_id)]
