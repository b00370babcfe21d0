"""The gRPC server of every service: its contracts, sessions, health and reflection."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from headrace_common.errors import HeadraceError
from headrace_common.metrics import RpcMetrics
from headrace_common.rpc import CHANNEL_OPTIONS, BoundMethod, Call, bind, serving
from headrace_common.rpc_front import RpcFront, inner_address
from headrace_common.rpc_status import to_status
from headrace_common.session_server import SessionServicer, session_descriptor
from headrace_common.settings import split_address

# Around a call; raises if it must not begin.
_Around = Callable[[], AbstractContextManager[None]]


def _generic_handler(
    methods: Iterable[BoundMethod], metrics: RpcMetrics | None, around: _Around = nullcontext
) -> list[grpc.GenericRpcHandler]:
    by_service: dict[str, dict[str, grpc.RpcMethodHandler[Message, Message]]] = {}
    for method in methods:
        service, _, name = method.name.partition("/")
        by_service.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(
            _plain(method, metrics, around),
            request_deserializer=method.request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
    return [grpc.method_handlers_generic_handler(s, h) for s, h in by_service.items()]


def _plain(
    method: BoundMethod, metrics: RpcMetrics | None, around: _Around
) -> Callable[..., AsyncIterator[Message]]:
    # Unary and streaming calls look the same on the wire, so one shape of handler serves all four.
    async def handle(
        requests: AsyncIterator[Message], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Message]:  # Any: grpc's own request and response types
        metadata = dict(context.invocation_metadata() or ())
        answers = method.start(requests, Call(context.time_remaining()))
        try:
            with serving(method, str(metadata.get("traceparent", "")), metrics), around():
                async for answer in answers:
                    yield answer
        except HeadraceError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        finally:
            await cast("Any", answers).aclose()  # Any: AsyncIterator has no aclose, generators do

    return handle


class RpcServer:
    """A gRPC server: the given contracts, sessions, health and reflection.

    Args:
        address: host:port; port 0 takes any free one, see `port`.
        services: pairs of contract descriptor and servicer.
        metrics: where calls are counted.
        listener: listened on instead of the address; whoever holds it too listens after us.
    """

    def __init__(
        self,
        address: str,
        services: list[tuple[ServiceDescriptor, object]],
        metrics: RpcMetrics | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener
        methods = [
            method for descriptor, servicer in services for method in bind(descriptor, servicer)
        ]
        self._sessions = SessionServicer(methods, metrics)
        self._server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(
            _generic_handler(methods, metrics, self._sessions.serving_plain)
        )
        self._server.add_generic_rpc_handlers(
            _generic_handler(bind(session_descriptor(), self._sessions), None)
        )
        self._names = [descriptor.full_name for descriptor, _ in services]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        shown = [session_descriptor().full_name, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection([*self._names, *shown], self._server)
        self._front: RpcFront | None = None
        self.address = address
        self.port = 0

    async def start(self) -> None:
        """Bind and serve; not ready until `set_ready`.

        Raises:
            OSError: the address cannot be bound.
        """
        inner = inner_address(f"headrace-{secrets.token_hex(8)}")
        inner_port = self._server.add_insecure_port(inner)
        await self._server.start()
        self._front = RpcFront(self._sessions.connect, inner, inner_port)
        try:
            self.port = await self._listen(self._front)
        except OSError as error:
            await self._server.stop(None)
            raise OSError(f"cannot listen on {self.address}: in use or not ours") from error
        await self.set_ready(False)

    async def _listen(self, front: RpcFront) -> int:
        if self._listener is not None:
            return await front.listen_on(self._listener)
        return await front.listen(*split_address(self.address))

    @property
    def num_running(self) -> int:
        """Calls being served, over sessions or plain gRPC."""
        return self._sessions.num_running

    async def set_ready(self, ready: bool) -> None:
        """Answer the gRPC health protocol for all services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float, *, refuses: bool = True) -> None:
        """Let running calls end for *grace_s* seconds, then cut them.

        Args:
            grace_s: longest wait.
            refuses: new calls meanwhile. Else they are served, and cut with the rest: for peers
                that make a call again when its connection ends.
        """
        await self.set_ready(False)
        if self._listener is not None and self._front is not None:
            # Who connects now waits for, or finds, the next process.
            self._front.stop_listening()
        await self._sessions.drain(grace_s, refuses=refuses)
        self.cut()
        await self._server.stop(1.0)

    def cut(self) -> None:
        """Stop listening and end all connections, as a crash would."""
        if self._front is not None:
            self._front.close()
