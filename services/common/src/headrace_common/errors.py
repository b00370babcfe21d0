"""The one tree of errors, translated only at the edges.

::

    HeadraceError
      InvalidRequest            INVALID_REQUEST      INVALID_ARGUMENT     400
        ContextTooLong          CONTEXT_TOO_LONG     INVALID_ARGUMENT     400
        StaleVersion            STALE_VERSION        FAILED_PRECONDITION  412, admin APIs
      UnknownKey                UNKNOWN_KEY          UNAUTHENTICATED      401
        KeyRevoked              KEY_REVOKED          UNAUTHENTICATED      401
      ModelNotAllowed           MODEL_NOT_ALLOWED    PERMISSION_DENIED    403
      ScopeMissing              SCOPE_MISSING        PERMISSION_DENIED    403
      ModelNotFound             MODEL_NOT_FOUND      NOT_FOUND            404
      NotFound                  NOT_FOUND            NOT_FOUND            404
      InputBlocked              INPUT_BLOCKED        FAILED_PRECONDITION  400
      RequestTooLargeForLimit   REQUEST_TOO_LARGE_FOR_LIMIT  OUT_OF_RANGE 400
      RateLimited               RATE_LIMITED         RESOURCE_EXHAUSTED   429 + Retry-After
      BudgetExhausted           BUDGET_EXHAUSTED     RESOURCE_EXHAUSTED   429
      Unavailable               UNAVAILABLE          UNAVAILABLE          503 + Retry-After
        QueueFull               QUEUE_FULL
        NoReplica               NO_REPLICA
        GuardUnavailable        GUARD_UNAVAILABLE
        ReplicaDraining         REPLICA_DRAINING     (never seen by clients while another serves)
        ReplicaLost             REPLICA_LOST         (likewise)
      Unimplemented             UNIMPLEMENTED        UNIMPLEMENTED        501
      Deadline                  DEADLINE             DEADLINE_EXCEEDED    504
      ClientGone                CLIENT_GONE          CANCELLED            499, logs only
      Internal                  INTERNAL             INTERNAL             500
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class HeadraceError(Exception):
    """Something that a caller can be told.

    Args:
        public_message: one or two sentences for the caller; says what to do.
        param: name of the request field at fault, if any.
        retry_after_s: when to come back; None = not known or useless.
        metadata: short facts for machines (strings), e.g. the binding limit.
    """

    reason: ClassVar[str] = "INTERNAL"
    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    # `type` and `code` of the public error object, as OpenAI's SDKs know them.
    public_type: ClassVar[str] = "server_error"
    public_code: str | None = "internal_error"

    def __init__(
        self,
        public_message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(public_message)
        self.public_message = public_message
        self.param = param
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}


class InvalidRequest(HeadraceError):
    """The request is wrong; the caller must fix it."""

    reason = "INVALID_REQUEST"
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    public_type = "invalid_request_error"
    public_code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and output do not fit the model's context."""

    reason = "CONTEXT_TOO_LONG"
    public_code = "context_length_exceeded"


class StaleVersion(InvalidRequest):
    """A change was made to another version than the one in force; read it again first."""

    reason = "STALE_VERSION"
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 412
    public_code = "stale_version"


class UnknownKey(HeadraceError):
    """No such API key."""

    reason = "UNKNOWN_KEY"
    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    public_type = "authentication_error"
    public_code = "invalid_api_key"


class KeyRevoked(UnknownKey):
    """The API key was revoked or has expired."""

    reason = "KEY_REVOKED"


class ModelNotAllowed(HeadraceError):
    """The key may not use this model."""

    reason = "MODEL_NOT_ALLOWED"
    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    public_type = "permission_error"
    public_code = "model_not_allowed"


class ScopeMissing(HeadraceError):
    """The key is for something else, such as usage alone."""

    reason = "SCOPE_MISSING"
    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    public_type = "permission_error"
    public_code = "missing_scope"


class NotFound(HeadraceError):
    """The thing asked for does not exist."""

    reason = "NOT_FOUND"
    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    public_type = "invalid_request_error"
    public_code = "not_found"


class ModelNotFound(NotFound):
    """No such model is served."""

    reason = "MODEL_NOT_FOUND"
    public_code = "model_not_found"


class InputBlocked(HeadraceError):
    """The guard refuses the input."""

    reason = "INPUT_BLOCKED"
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400
    public_type = "invalid_request_error"
    public_code = "content_filter"


class RequestTooLargeForLimit(HeadraceError):
    """The request alone exceeds what a limit could ever hold."""

    reason = "REQUEST_TOO_LARGE_FOR_LIMIT"
    grpc_code = grpc.StatusCode.OUT_OF_RANGE
    http_status = 400
    public_type = "invalid_request_error"
    public_code = "request_too_large_for_limit"


class RateLimited(HeadraceError):
    """A rate or concurrency limit binds; waiting helps."""

    reason = "RATE_LIMITED"
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True
    public_type = "rate_limit_error"
    public_code = "rate_limit_exceeded"


class BudgetExhausted(HeadraceError):
    """The money is used up; waiting does not help."""

    reason = "BUDGET_EXHAUSTED"
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    public_type = "insufficient_quota"
    public_code = "insufficient_quota"


class Unavailable(HeadraceError):
    """A dependency cannot answer now."""

    reason = "UNAVAILABLE"
    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True
    public_type = "service_unavailable"
    public_code = "service_unavailable"


class QueueFull(Unavailable):
    """Every queue that could take the request is full."""

    reason = "QUEUE_FULL"
    public_code = "overloaded"


class NoReplica(Unavailable):
    """No ready replica serves the model."""

    reason = "NO_REPLICA"
    public_code = "no_replica"


class GuardUnavailable(Unavailable):
    """The content could not be judged and the policy is fail-closed."""

    reason = "GUARD_UNAVAILABLE"
    public_code = "guard_unavailable"


class ReplicaDraining(Unavailable):
    """The replica is leaving; pick another."""

    reason = "REPLICA_DRAINING"


class ReplicaLost(Unavailable):
    """The replica went away in the middle; resume elsewhere."""

    reason = "REPLICA_LOST"


class Unimplemented(HeadraceError):
    """This build cannot do that."""

    reason = "UNIMPLEMENTED"
    grpc_code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 501
    public_type = "invalid_request_error"
    public_code = "not_implemented"


class Deadline(HeadraceError):
    """The time given was not enough."""

    reason = "DEADLINE"
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    public_type = "timeout_error"
    public_code = "timeout"


class ClientGone(HeadraceError):
    """Nobody listens any more."""

    reason = "CLIENT_GONE"
    grpc_code = grpc.StatusCode.CANCELLED
    http_status = 499
    public_code = "client_closed_request"


class Internal(HeadraceError):
    """Our mistake. The public message never holds text from inside."""

    def __init__(self, public_message: str = "The server had an error. Try again.") -> None:
        super().__init__(public_message)


def _leaves(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


# Most specific last would not matter: reasons are unique except for the base, which is INTERNAL.
BY_REASON: dict[str, type[HeadraceError]] = {
    cls.reason: cls for cls in _leaves(HeadraceError) if cls is not HeadraceError
}


def from_reason(
    reason: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    metadata: dict[str, str] | None = None,
) -> HeadraceError:
    """Rebuild the error that a peer raised. An unknown reason becomes `Internal`."""
    cls = BY_REASON.get(reason, Internal)
    if cls is Internal:
        return Internal()
    return cls(message, param=param, retry_after_s=retry_after_s, metadata=metadata)


def error_body(error: HeadraceError) -> dict[str, dict[str, str | None]]:
    """Render the public JSON object ``{"error": {message, type, param, code}}``."""
    return {
        "error": {
            "message": error.public_message,
            "type": error.public_type,
            "param": error.param,
            "code": error.public_code,
        }
    }
