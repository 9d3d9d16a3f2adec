"""The table from exceptions to HTTP status codes, and OpenAI's JSON error format.

Errors of polylora's tree carry their own message. Anything else is a bug: it is logged here with its traceback, and the
client only gets a generic message. API keys are removed from messages.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

from app.deployments.object_storage.models import StorageQuotaExceeded
from app.deployments.tenancy.quota.limits import AdapterQuotaError, LimitError, SpendLimitError
from app.engine import errors
from app.redaction import without_keys

logger = logging.getLogger(__name__)


class HttpError(NamedTuple):
    """Status, type and code of an error response."""

    status: int
    type: str
    code: str


class BodyTooLarge(errors.InvalidRequest):
    """The request body is longer than `limits.max_body_bytes`."""


class BodyTimeout(errors.InvalidRequest):
    """The client sent the request body too slowly."""


class InvalidJson(errors.InvalidRequest):
    """The request body is not JSON."""


class UnknownEncoding(errors.InvalidRequest):
    """The request body has a content encoding that is not supported."""


class UnknownContentType(errors.InvalidRequest):
    """The request body's content type is not JSON."""


class PreviousResponseNotFound(errors.InvalidRequest):
    """The request continues a response that is not stored."""


class CrossSite(errors.PolyloraError):
    """A web page of another site sent the request from a browser."""


class ManagementRefused(errors.PolyloraError):
    """This caller or address may not manage adapters."""


class NotAuthenticated(errors.PolyloraError):
    """The request lacks the token that it needs, or has a wrong one."""


class InvalidApiKey(NotAuthenticated):
    """The request's API key is missing, wrong, expired or revoked."""


class WrongKeyKind(errors.PolyloraError):
    """An inference key where an admin key is needed, or the reverse."""


class ReplicaDraining(errors.PolyloraError):
    """The replica drains already."""


class LastReplica(errors.PolyloraError):
    """No other replica could take the requests of the one that is to be drained."""


class ClientGone(errors.PolyloraError):
    """The client disconnected."""


#: The most specific class wins.
TABLE: dict[type[Exception], HttpError] = {
    BodyTooLarge: HttpError(413, "invalid_request_error", "body_too_large"),
    BodyTimeout: HttpError(408, "invalid_request_error", "body_timeout"),
    UnknownEncoding: HttpError(415, "invalid_request_error", "unsupported_encoding"),
    UnknownContentType: HttpError(415, "invalid_request_error", "unsupported_content_type"),
    PreviousResponseNotFound: HttpError(400, "invalid_request_error", "previous_response_not_found"),
    CrossSite: HttpError(403, "permission_error", "cross_site_request"),
    ManagementRefused: HttpError(403, "permission_error", "management_refused"),
    NotAuthenticated: HttpError(401, "authentication_error", "invalid_management_token"),
    InvalidApiKey: HttpError(401, "invalid_request_error", "invalid_api_key"),
    WrongKeyKind: HttpError(403, "insufficient_permissions", "insufficient_permissions"),
    StorageQuotaExceeded: HttpError(403, "insufficient_quota", "storage_quota_reached"),
    AdapterQuotaError: HttpError(403, "insufficient_quota", "adapter_quota_reached"),
    SpendLimitError: HttpError(429, "insufficient_quota", "insufficient_quota"),
    LimitError: HttpError(429, "requests", "rate_limit_exceeded"),
    InvalidJson: HttpError(400, "invalid_request_error", "invalid_json"),
    errors.ContextOverflow: HttpError(400, "invalid_request_error", "context_length_exceeded"),
    errors.UnsupportedField: HttpError(400, "invalid_request_error", "unsupported_field"),
    errors.InvalidRequest: HttpError(400, "invalid_request_error", "invalid_request"),
    errors.ModelNotFound: HttpError(404, "invalid_request_error", "model_not_found"),
    errors.NotFound: HttpError(404, "invalid_request_error", "not_found"),
    errors.QueueFull: HttpError(429, "rate_limit_error", "queue_full"),
    errors.NotReady: HttpError(503, "server_error", "not_ready"),
    errors.ServerOverloaded: HttpError(503, "server_error", "overloaded"),
    ClientGone: HttpError(499, "client_closed_request", "client_closed_request"),
    errors.DeadlineExceeded: HttpError(504, "server_error", "timeout"),
    ReplicaDraining: HttpError(409, "invalid_request_error", "replica_draining"),
    LastReplica: HttpError(409, "invalid_request_error", "last_replica"),
    errors.AdapterBusy: HttpError(409, "invalid_request_error", "adapter_busy"),
    errors.AdapterUnloaded: HttpError(409, "invalid_request_error", "adapter_unloaded"),
    errors.AdapterUntrusted: HttpError(403, "invalid_request_error", "untrusted_adapter"),
    errors.AdapterQuarantined: HttpError(503, "server_error", "adapter_quarantined"),
    errors.AdapterUnreadable: HttpError(503, "server_error", "adapter_unreadable"),
    errors.AdapterReadFailed: HttpError(503, "server_error", "adapter_not_read"),
    errors.AdapterWriteFailed: HttpError(503, "server_error", "adapter_write_failed"),
    errors.AdapterError: HttpError(400, "invalid_request_error", "invalid_adapter"),
    errors.UnsafeSource: HttpError(403, "invalid_request_error", "unsafe_source"),
    errors.SourceError: HttpError(502, "server_error", "source_error"),
    errors.PolyloraError: HttpError(500, "server_error", "internal_error"),
}
#: OpenAI's clients retry after 409 and 5xx unless `X-Should-Retry` is false. Retrying these is useless, or harmful
#: where the request makes engines fail.
FINAL = (
    ReplicaDraining,
    LastReplica,
    errors.EngineFailure,
    errors.DeadlineExceeded,
    errors.AdapterBusy,
    errors.AdapterUnloaded,
)
#: Retry-After for failures of the machine itself (disk, memory), whose duration is unknown.
MACHINE_RETRY_S = 5
UNEXPECTED = HttpError(500, "server_error", "internal_error")


class ErrorReply(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def error_reply(error: BaseException) -> ErrorReply:
    """The response for an exception, in OpenAI's format: {"error": {message, type, param, code}}."""
    row = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), None)
    if row is None:
        logger.error("unexpected error while serving a request", exc_info=error)
        row, message = UNEXPECTED, "internal error; the server's log has the details"
    else:
        message = without_keys(str(error))
    kind = "tokens" if isinstance(error, LimitError) and error.kind == "tokens" else row.type
    param = getattr(error, "param", None)
    body = {
        "error": {
            "message": message,
            "type": kind,
            "param": None if param is None else without_keys(param),
            "code": row.code,
        }
    }
    headers = {}
    if isinstance(error, errors.ServerOverloaded | errors.AdapterQuarantined):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, errors.AdapterReadFailed | errors.AdapterWriteFailed):
        headers["Retry-After"] = str(MACHINE_RETRY_S)
    elif isinstance(error, LimitError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    elif isinstance(error, LimitError):  # retrying is useless
        headers["X-Should-Retry"] = "false"
    elif isinstance(error, BodyTimeout):  # the rest of the body may never come
        headers["Connection"] = "close"
    elif isinstance(error, NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, FINAL):
        headers["X-Should-Retry"] = "false"
    return ErrorReply(row.status, body, headers)
