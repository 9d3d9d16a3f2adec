"""Errors for other Ray jobs, which need not have this package.

In: whatever a call raises. Out: one of Python's own exceptions, whose text is the code and the message that HTTP would
have answered, "model_not_found: there is no ...". Rule: a caller can tell what to do by the class: ValueError for a
mistake of its own, LookupError for a name that does not exist, PermissionError, TimeoutError; RuntimeError is the
service's trouble.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.deployments.ingress.status import error_answer

#: By the status of the HTTP answer; others of 400 to 499 are ValueErrors.
_KINDS: dict[int, type[Exception]] = {
    401: PermissionError,
    403: PermissionError,
    404: LookupError,
    429: RuntimeError,
    504: TimeoutError,
}


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raises the plain form of whatever is raised inside; an end of the call (cancelled, closed) is left as it is."""
    try:
        yield
    except Exception as error:
        raise plain_error(error) from None


def plain_error(error: Exception) -> Exception:
    """One of Python's own."""
    answer = error_answer(error)
    told = answer.body["error"]
    kind = _KINDS.get(answer.status, ValueError if answer.status < 500 else RuntimeError)
    return kind(f"{told['code']}: {told['message']}")
