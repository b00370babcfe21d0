"""The server's side of a session: a task per call, through the same bound methods as plain gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol, cast

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    QueueFull,
    ReplicaDraining,
    Unimplemented,
)
from headrace_common.frame_socket import MAX_FRAME_ITEMS, FrameSocket
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.metrics import RpcMetrics
from headrace_common.rpc import BoundMethod, Call, serving
from headrace_common.rpc_status import to_status
from headrace_common.session_items import call_ref, failure, message, signal
from headrace_contracts.session.v1 import session_pb2
from headrace_contracts.session.v1.session_pb2 import Frame, Item

# Messages of one call that a server keeps for a handler that does not read.
MAX_UNREAD = 1024
_DRAINING = "This server is shutting down."


def session_descriptor() -> ServiceDescriptor:
    """The session contract."""
    return session_pb2.DESCRIPTOR.services_by_name["Session"]


class ItemSink(Protocol):
    """Where the items of one session go."""

    def put(self, item: bytes) -> None:
        """Add an item (`session_items`) to the next frame."""
        ...


class _FrameQueue:
    """Items that wait for the writer of a gRPC stream."""

    def __init__(self) -> None:
        self._items: list[bytes] = []
        self._filled = asyncio.Event()

    def put(self, item: bytes) -> None:
        """Add an item to the next frame."""
        self._items.append(item)
        self._filled.set()

    async def frame(self) -> Frame:
        """Wait for items and take all that are ready."""
        await self._filled.wait()
        items, self._items = self._items[:MAX_FRAME_ITEMS], self._items[MAX_FRAME_ITEMS:]
        if not self._items:
            self._filled.clear()
        return Frame.FromString(b"".join(items))


class _ServerCall(AsyncIterator[Message]):
    """One running call on a server's stream, and its request messages in turn.

    Not by a generator: most handlers take one message, and a generator that is left before its end
    is closed by a task of its own.
    """

    def __init__(self, method: BoundMethod, opened: Item, outbox: ItemSink) -> None:
        self._method, self._opened, self._outbox = method, opened, outbox
        self._ref = call_ref(opened.call_id)
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._credit = opened.credit
        self._credited = asyncio.Event()
        self._is_half_closed = False
        # Its last message said so.
        self._has_ended = False
        self.task: asyncio.Task[None] | None = None

    def deliver(self, payload: bytes | None) -> bool:
        """Queue a request message (None = half close); False if the handler reads too slowly.

        There is always room for the half close; what follows on it is dropped.
        """
        if self._is_half_closed:
            return True
        if payload is not None and self._requests.qsize() >= MAX_UNREAD:
            return False
        self._is_half_closed = payload is None
        self._requests.put_nowait(payload)
        return True

    def add_credit(self, credit: int) -> None:
        self._credit += credit
        self._credited.set()

    async def run(self, metrics: RpcMetrics | None) -> None:
        """Serve the call and send its END, unless it is cancelled."""
        status = b""
        try:
            with serving(self._method, self._opened.traceparent, metrics):
                await self._serve()
        except HeadraceError as error:
            status = to_status(error).SerializeToString()
        if not self._has_ended:
            self._outbox.put(
                failure(self._ref, status) if status else signal(self._ref, Item.KIND_END)
            )

    async def _serve(self) -> None:
        timeout_s = self._opened.deadline_ms / 1000 if self._opened.deadline_ms else None
        async with asyncio.timeout(timeout_s):
            answers = self._method.start(self, Call(timeout_s))
            async with contextlib.aclosing(cast("_Closable", answers)) as stream:
                async for answer in stream:
                    await self._take_credit()
                    self._has_ended = not self._method.gives_stream
                    encoded = answer.SerializeToString()
                    self._outbox.put(message(self._ref, encoded, is_last=self._has_ended))

    async def _take_credit(self) -> None:
        while self._credit <= 0:
            self._credited.clear()
            await self._credited.wait()
        self._credit -= 1

    async def __anext__(self) -> Message:
        """Return the next request message."""
        payload = await self._requests.get()
        if payload is None:
            # For whoever asks again.
            self._requests.put_nowait(None)
            raise StopAsyncIteration
        try:
            return self._method.request.FromString(payload)
        except DecodeError as error:
            raise InvalidRequest(f"{self._method.name}: the message cannot be parsed") from error


class SessionServicer:
    """Serves sessions: starts a task per call, through the same bound methods as plain gRPC.

    Plain gRPC calls are counted here too, so that a drain waits for them and refuses new ones.
    """

    def __init__(self, methods: Iterable[BoundMethod], metrics: RpcMetrics | None) -> None:
        self._methods = {method.name: method for method in methods}
        self._metrics = metrics
        self._running: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Calls being served, over sessions or plain gRPC."""
        return len(self._running)

    @contextlib.contextmanager
    def serving_plain(self) -> Iterator[None]:
        """Count the current task's plain gRPC call among those being served.

        Raises:
            ReplicaDraining: new calls are refused.
        """
        if self._is_draining:
            raise ReplicaDraining(_DRAINING)
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def connect(self) -> FrameSocket:
        """Return the server's end for one more peer; when it leaves, its calls are cancelled."""
        calls: dict[int, _ServerCall] = {}

        def take(frame: Frame) -> None:
            for item in frame.items:
                self._handle(item, calls, connection)

        def leave() -> None:
            for call in calls.values():
                if call.task is not None:
                    call.task.cancel()

        connection = FrameSocket(take, leave)
        return connection

    async def Open(self, frames: AsyncIterator[Frame], _call: Call) -> AsyncIterator[Frame]:  # noqa: N802 - contract name
        """Serve one peer over gRPC until it leaves; then cancel what it left."""
        outbox = _FrameQueue()
        calls: dict[int, _ServerCall] = {}
        reader = asyncio.create_task(self._read(frames, calls, outbox))
        try:
            while not reader.done():
                waiting = asyncio.ensure_future(outbox.frame())
                try:
                    await asyncio.wait({waiting, reader}, return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        yield waiting.result()
                finally:
                    waiting.cancel()
        finally:
            await cancel_and_wait(reader, *[call.task for call in calls.values()])

    async def drain(self, grace_s: float, *, refuses: bool = True) -> None:
        """Wait for running calls, at most *grace_s* seconds; new ones are refused, or served."""
        self._is_draining = refuses
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        # One turn of the loop, so that the last END items reach their writers.
        await asyncio.sleep(0.01)

    async def _read(
        self, frames: AsyncIterator[Frame], calls: dict[int, _ServerCall], outbox: ItemSink
    ) -> None:
        async for frame in frames:
            for item in frame.items:
                self._handle(item, calls, outbox)

    def _handle(self, item: Item, calls: dict[int, _ServerCall], outbox: ItemSink) -> None:
        if item.kind == Item.KIND_OPEN:
            self._open(item, calls, outbox)
            return
        call = calls.get(item.call_id)
        if call is None:
            return
        if item.kind == Item.KIND_CREDIT:
            call.add_credit(item.credit)
        elif item.kind == Item.KIND_CANCEL:
            if call.task is not None:
                call.task.cancel()
        elif not call.deliver(item.payload if item.kind == Item.KIND_MESSAGE else None):
            if call.task is not None:
                call.task.cancel()
            self._end(item.call_id, QueueFull("Messages came faster than they were read."), outbox)
        elif item.is_last:
            call.deliver(None)

    def _open(self, item: Item, calls: dict[int, _ServerCall], outbox: ItemSink) -> None:
        method = self._methods.get(item.method)
        if self._is_draining:
            self._end(item.call_id, ReplicaDraining(_DRAINING), outbox)
        elif method is None:
            self._end(item.call_id, Unimplemented(f"No method {item.method[:100]!r} here."), outbox)
        else:
            call = calls[item.call_id] = _ServerCall(method, item, outbox)
            if item.has_message:
                call.deliver(item.payload)
            if item.is_last:
                call.deliver(None)

            def forget(task: asyncio.Task[None]) -> None:
                self._running.discard(task)
                calls.pop(item.call_id, None)
                # A cancelled task holds the frames that it left, and they hold the call.
                call.task = None

            call.task = asyncio.create_task(call.run(self._metrics))
            self._running.add(call.task)
            call.task.add_done_callback(forget)

    @staticmethod
    def _end(call_id: int, error: HeadraceError, outbox: ItemSink) -> None:
        status = to_status(error).SerializeToString()
        outbox.put(failure(call_ref(call_id), status))


class _Closable(AsyncIterator[Message]):
    """An async generator as `contextlib.aclosing` wants it."""

    async def aclose(self) -> None: ...
