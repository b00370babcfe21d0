"""Errors on the wire: google.rpc.Status with ErrorInfo and RetryInfo, and back."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace_common.errors import (
    ClientGone,
    Deadline,
    HeadraceError,
    Internal,
    ReplicaLost,
    Unimplemented,
    from_reason,
)

DOMAIN = "headrace"
_PARAM = "param"


def to_status(error: HeadraceError, domain: str = DOMAIN) -> status_pb2.Status:
    """Render *error* for the wire."""
    metadata = dict(error.metadata)
    if error.param is not None:
        metadata[_PARAM] = error.param
    details = [
        _pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=metadata))
    ]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = code_pb2.Code.Value(error.grpc_code.name)
    return status_pb2.Status(code=code, message=error.public_message, details=details)


def from_status(status: status_pb2.Status) -> HeadraceError:
    """Rebuild the peer's error. Without ErrorInfo the gRPC code alone decides."""
    info, retry_after_s = None, None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if info is None:
        return from_code(status.code, status.message)
    metadata = dict(info.metadata)
    param = metadata.pop(_PARAM, None)
    return from_reason(
        info.reason, status.message, param=param, retry_after_s=retry_after_s, metadata=metadata
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> HeadraceError:
    """Rebuild the peer's error from what grpc.aio raised."""
    status = rpc_status.from_call(_AsCall(error))
    if status is not None:
        return from_status(status)
    return from_code(error.code().value[0], error.details() or "")


def from_code(code: int, message: str) -> HeadraceError:
    """Translate a bare gRPC code, as the library itself raises it."""
    match code:
        case code_pb2.UNAVAILABLE:
            return ReplicaLost("The peer cannot be reached.")
        case code_pb2.DEADLINE_EXCEEDED:
            return Deadline("The peer took too long.")
        case code_pb2.CANCELLED:
            return ClientGone("The call was cancelled.")
        case code_pb2.UNIMPLEMENTED:
            return Unimplemented(message or "The peer does not implement this call.")
        case _:
            return Internal()


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class _AsCall:
    """What `rpc_status.from_call` reads, out of an AioRpcError."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple((key, value) for key, value in self._error.trailing_metadata())

    def code(self) -> grpc.StatusCode:
        return self._error.code()

    def details(self) -> str:
        return self._error.details() or ""
