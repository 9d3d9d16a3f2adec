"""Errors as another Ray job gets them: of Python's own classes, with the code and the message of the HTTP answer."""

from __future__ import annotations

import ast
import asyncio
import pickle
from pathlib import Path

import pytest

from app.deployments.ingress.handle_api import builtin_errors
from app.engine.errors import (
    AdapterUntrusted,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotReady,
    PolyloraError,
    QueueFull,
)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ModelNotFound("no such adapter"), LookupError, "model_not_found: no such adapter"),
        (NotFound("no such file"), LookupError, "not_found: no such file"),
        (InvalidRequest("bad", param="text"), ValueError, "invalid_request: bad"),
        (AdapterUntrusted("no"), PermissionError, "untrusted_adapter: no"),
        (DeadlineExceeded("late"), TimeoutError, "timeout: late"),
        (QueueFull("full"), RuntimeError, "queue_full: full"),
        (NotReady("soon"), RuntimeError, "not_ready: soon"),
        (EngineFailure("dead"), RuntimeError, "internal_error: dead"),
        (KeyError("a bug"), RuntimeError, "internal_error: internal error; the server's log has the details"),
    ],
)
def test_an_error_is_pythons_own(error: Exception, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught, builtin_errors():
        raise error
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert not isinstance(caught.value, PolyloraError)
    assert caught.value.__cause__ is None
    assert pickle.loads(pickle.dumps(caught.value)).args == (text,)


def test_an_end_is_left_as_it_is() -> None:
    for end in (asyncio.CancelledError, GeneratorExit):
        with pytest.raises(end), builtin_errors():
            raise end


def test_every_call_of_the_handle_that_can_fail_has_them() -> None:
    """The deployment's methods, read from its source: Serve starts it, and these tests do not."""
    source = Path("app/deployments/ingress/deployment.py").read_text()
    (deployment,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "Ingress")
    methods = {node.name: node for node in ast.walk(deployment) if isinstance(node, ast.AsyncFunctionDef)}
    for name in ("generate", "stream", "chat", "complete", "stream_chat", "stream_complete", "embed", "load", "unload"):
        first = next(node for node in methods[name].body if not isinstance(node, ast.Expr))
        assert isinstance(first, ast.With), name
        assert ast.unparse(first.items[0]) == "builtin_errors()", name
