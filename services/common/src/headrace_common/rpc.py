"""gRPC servers and channels as every service uses them.

A servicer is a plain class with one coroutine (or async generator) per method of its contract. It
knows nothing of gRPC: it takes the request (or an async iterator of requests) and a `Call`, and
raises `HeadraceError`. `bind` pairs it with the contract's descriptor; `rpc_server.RpcServer`
serves the pairs both as ordinary gRPC services and through the multiplexed session (`session`),
so the two ways in cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.trace import SpanKind

from headrace_common.errors import Deadline, HeadraceError, Internal, InvalidRequest
from headrace_common.lifecycle import is_cancelled
from headrace_common.metrics import RpcMetrics
from headrace_common.rpc_status import from_rpc_error
from headrace_common.telemetry import current_traceparent, span

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
# A peer that is frozen, not closed, is noticed within four seconds.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)


@dataclass(frozen=True)
class MethodRef(Generic[Req, Res]):
    """One method of a contract, typed: what a client needs to call it."""

    name: str
    request: type[Req]
    response: type[Res]

    @property
    def path(self) -> str:
        """The method's gRPC path."""
        return f"/{self.name}"


def method_ref(
    service: ServiceDescriptor, name: str, req: type[Req], res: type[Res]
) -> MethodRef[Req, Res]:
    """Name a method of *service* and check that the types are the contract's.

    Raises:
        TypeError: the contract says otherwise.
    """
    method = service.methods_by_name[name]
    if method.input_type is not req.DESCRIPTOR or method.output_type is not res.DESCRIPTOR:
        raise TypeError(f"{method.full_name} does not take {req} and give {res}")
    return MethodRef(f"{service.full_name}/{name}", req, res)


class Call:
    """What a servicer may know of the call it serves."""

    __slots__ = ("_deadline_s",)

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def time_left_s(self) -> float | None:
        """Seconds until the caller gives up; None = it set no deadline."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()


@dataclass(frozen=True)
class BoundMethod:
    """A servicer's method with what the contract says of it."""

    name: str
    handler: Callable[..., Any]  # Any: unary -> Awaitable, streaming -> AsyncIterator
    request: type[Message]
    response: type[Message]
    takes_stream: bool
    gives_stream: bool

    def start(self, requests: AsyncIterator[Message], call: Call) -> AsyncIterator[Message]:
        """Run the handler; a unary answer becomes a stream of one."""
        if self.gives_stream:
            if self.takes_stream:
                return cast("AsyncIterator[Message]", self.handler(requests, call))
            return self._one_to_many(requests, call)
        return self._to_one(requests, call)

    async def _one_to_many(
        self, requests: AsyncIterator[Message], call: Call
    ) -> AsyncIterator[Message]:
        answers = self.handler(await self._only(requests), call)
        try:
            async for answer in answers:
                yield answer
        finally:
            await answers.aclose()

    async def _to_one(self, requests: AsyncIterator[Message], call: Call) -> AsyncIterator[Message]:
        argument = requests if self.takes_stream else await self._only(requests)
        yield await self.handler(argument, call)

    async def _only(self, requests: AsyncIterator[Message]) -> Message:
        message = await anext(requests, None)
        if message is None:
            raise InvalidRequest(f"{self.name}: the call has no message")
        return message


def bind(service: ServiceDescriptor, servicer: object) -> list[BoundMethod]:
    """Pair a servicer's methods with their contract.

    Raises:
        TypeError: the servicer lacks a method of the contract.
    """
    return [_bind_one(method, servicer) for method in service.methods]


def _bind_one(method: MethodDescriptor, servicer: object) -> BoundMethod:
    handler = getattr(servicer, method.name, None)
    if handler is None:
        raise TypeError(f"{type(servicer).__name__} lacks {method.full_name}")
    return BoundMethod(
        name=f"{method.containing_service.full_name}/{method.name}",
        handler=handler,
        request=GetMessageClass(method.input_type),
        response=GetMessageClass(method.output_type),
        takes_stream=method.client_streaming,
        gives_stream=method.server_streaming,
    )


@contextmanager
def serving(method: BoundMethod, traceparent: str, metrics: RpcMetrics | None) -> Iterator[None]:
    """Account for one call: span, duration, outcome. Errors become `HeadraceError`.

    Raises:
        HeadraceError: what the servicer raised, or `Internal` for anything unexpected.
    """
    started, code = time.monotonic(), "OK"
    if metrics is not None:
        metrics.running.labels(method.name).inc()
    try:
        with span(method.name, traceparent=traceparent or None, kind=SpanKind.SERVER):
            yield
    except HeadraceError as error:
        code = error.grpc_code.name
        raise
    except GeneratorExit:
        code = "CANCELLED"
        raise
    except asyncio.CancelledError as error:
        code = "CANCELLED"
        if is_cancelled():
            raise
        # From inside, such as a future that others share: the caller is still there and waits.
        code = "INTERNAL"
        _log.exception("%s was cancelled from inside", method.name)
        raise Internal from error
    except TimeoutError as error:
        code = "DEADLINE_EXCEEDED"
        raise Deadline("The deadline of the call passed.") from error
    except Exception as error:
        code = "INTERNAL"
        _log.exception("%s failed", method.name)
        raise Internal from error
    finally:
        if metrics is not None:
            metrics.running.labels(method.name).dec()
            metrics.calls.labels(method.name, code).inc()
            metrics.duration_s.labels(method.name).observe(time.monotonic() - started)


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with keepalive and our message sizes."""
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one try to connect may take: a busy peer's loop answers the greeting.
        ("grpc.min_reconnect_backoff_ms", 2000),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that carries the current trace to the peer."""
    traceparent = current_traceparent()
    return (("traceparent", traceparent),) if traceparent else ()


async def call_unary(
    channel: grpc.aio.Channel, method: MethodRef[Req, Res], request: Req, timeout_s: float
) -> Res:
    """Make one plain unary call.

    Raises:
        HeadraceError: the peer's error, or `ReplicaLost` / `Deadline` from the transport.
    """
    stub: grpc.aio.UnaryUnaryMultiCallable[Req, Res] = channel.unary_unary(
        method.path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=method.response.FromString,
    )
    try:
        return await stub(request, timeout=timeout_s, metadata=trace_metadata())
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def call_stream(
    channel: grpc.aio.Channel,
    method: MethodRef[Req, Res],
    request: Req,
    timeout_s: float | None = None,
) -> AsyncGenerator[Res]:
    """Make one plain server-streaming call. Closing the generator cancels it.

    Raises:
        HeadraceError: as `call_unary`.
    """
    stub: grpc.aio.UnaryStreamMultiCallable[Req, Res] = channel.unary_stream(
        method.path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=method.response.FromString,
    )
    stream = stub(request, timeout=timeout_s, metadata=trace_metadata())
    try:
        async for response in stream:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        stream.cancel()
