"""Every error that a caller can meet, as one tree.

    PolyloraError
      InvalidRequest          the request can never succeed as written            (400)
        UnsupportedField        a field that would change the result is not implemented
        ContextOverflow         prompt + max_tokens exceed the context or the KV memory
      NotFound                this caller has no such object, or nothing is there (404)
        ModelNotFound           no model or adapter of this name is registered
      ServerOverloaded        try again later
        QueueFull               this engine's waiting queue is at its limit       (429)
        NotReady                no replica can take the request now               (503)
          AdapterPoolFull         pinned adapters leave no room for the request's
      DeadlineExceeded        the request took longer than it may                 (504)
      AdapterError            an adapter that cannot be used                      (400)
        AdapterFormatError      an unknown, malformed or missing file, key or tensor
        AdapterMismatch         well formed, but not for this base model
        AdapterTooLarge         more rank rows or bytes than this replica holds
        CombinationError        adapters that cannot be combined as requested
        AdapterUntrusted        not signed by a trusted key, or altered           (403)
        AdapterReadFailed       reading it crashed or timed out                   (503)
        AdapterWriteFailed      its rows did not reach the device                 (503)
        AdapterBusy             running sequences still use it                    (409)
        AdapterOverflow         its arithmetic gives infinite or NaN values
        MergedAdapterOnly       this engine has another adapter merged into its weights
        AdapterUnloaded         it was unloaded while it was being loaded         (409)
        AdapterQuarantined      it failed recently and is not tried again yet     (503)
        AdapterUnreadable       it is registered, but cannot be read at present   (503)
      UnsafeSource            a path or URI outside what this server may read     (403)
      SourceError             fetching from a permitted source failed             (502)
        FetchAbandoned          it was ended because no caller waited for it
      CheckpointError         a base model that cannot be loaded                  (at start)
      ConfigError             a configuration that contradicts itself             (at start)
        OutOfDeviceMemory     weights, KV blocks and adapters exceed the device's memory
      EngineFailure           the engine died; its streams end with this          (500)
        PoisonRequest           engines died over this very request

A message gives the offending value, the limit and the way out. The table of HTTP codes is in `app.deployments.ingress`;
the numbers above are for the reader.
"""

from __future__ import annotations

from collections.abc import Iterable


class PolyloraError(Exception):
    """Root of the tree. `str(error)` is safe to show to the caller."""


class InvalidRequest(PolyloraError):
    """The request can never succeed as written. `param` names the offending field, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedField(InvalidRequest):
    """A field that would change the result is not implemented here."""


class ContextOverflow(InvalidRequest):
    """The prompt, or prompt plus max_tokens, exceeds the context length or the KV memory."""


class NotFound(PolyloraError):
    """This caller has no such object, or there is nothing at an address."""


class ModelNotFound(NotFound):
    """No model or adapter of this name is registered for this caller."""


class ServerOverloaded(PolyloraError):
    """The request is valid, but this server has no room for it now. `retry_after_s` is a hint."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(ServerOverloaded):
    """The engine's waiting queue is at its limit."""


class NotReady(ServerOverloaded):
    """No replica can take the request at the moment."""


class AdapterPoolFull(NotReady):
    """Pinned adapters leave no room on this engine's device for the request's adapter."""


class DeadlineExceeded(PolyloraError):
    """The request took longer than the configured limit and was aborted. `num_tokens`: how many it had generated."""

    def __init__(self, message: str, num_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class AdapterError(PolyloraError):
    """An adapter that cannot be used."""


class AdapterFormatError(AdapterError):
    """A file, configuration key or tensor that is unknown, malformed or missing."""


class AdapterMismatch(AdapterError):
    """A well-formed adapter that does not fit this base model."""


class AdapterTooLarge(AdapterError):
    """An adapter that needs more rank rows or bytes than are configured."""


class CombinationError(AdapterError):
    """Adapters that cannot be combined as requested."""


class AdapterUntrusted(AdapterError):
    """An adapter that is not signed by a trusted key, or was altered after signing."""


class AdapterReadFailed(AdapterError):
    """Reading failed because of the file or of the machine. It may be tried again later."""


class AdapterWriteFailed(AdapterError):
    """Writing it to the device failed. The next request for it writes it again."""


class MergedAdapterOnly(AdapterError):
    """This engine serves only the adapter that is merged into its weights."""


class AdapterOverflow(AdapterError):
    """A request's output with this adapter is not a finite number: its values are too large."""


class AdapterBusy(AdapterError):
    """The operation must wait until running sequences have ended."""


class AdapterUnloaded(AdapterError):
    """The adapter was unloaded while it was being loaded."""


class AdapterQuarantined(AdapterError):
    """The adapter failed recently and is not tried again for `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdapterUnreadable(AdapterQuarantined):
    """The adapter is registered, but its files cannot be read or have changed.

    The message is for those who manage adapters, not for those who use them: it may contain paths of the server.
    """


class UnsafeSource(PolyloraError):
    """A path or URI outside the places this server is allowed to read."""


class SourceError(PolyloraError):
    """Fetching from a permitted source failed."""


class FetchAbandoned(SourceError):
    """A fetch was ended because no caller waited for it."""


class CheckpointError(PolyloraError):
    """A base model that cannot be loaded."""


class ConfigError(PolyloraError):
    """A configuration that contradicts itself or the machine."""


class OutOfDeviceMemory(ConfigError):
    """The configuration does not fit the device's memory; the message has the numbers."""


class EngineFailure(PolyloraError):
    """The engine stopped working; every stream of it ends with this error.

    `computing`: ids of the requests in the step that failed, if one did: one of them may be the cause.
    """

    def __init__(self, message: str, *, computing: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.computing = frozenset(computing)


class PoisonRequest(EngineFailure):
    """Engines failed when they computed this request, and it is not given to another one."""
