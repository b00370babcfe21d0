"""Many calls on one connection: the hot path's way to talk.

A unary Python gRPC call costs some 200 microseconds of CPU whatever it carries, a message on an
open gRPC stream 150, a frame here 15. So a process keeps one connection per peer for all its calls
(`frame_socket`; the same frames go over the gRPC method `Session.Open`). What is put in one turn of
the loop goes into one frame. A call keeps the meaning it has in plain gRPC: deadline, cancel,
status, back-pressure (credits, in messages); how it goes on is told in `session_call`.

When a connection breaks, the next call makes a new one. A frozen peer is lost after some seconds of
silence (`frame_socket`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator

from headrace_common.awake import awake_timeout
from headrace_common.errors import Deadline, ReplicaLost
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.proto_wire import Encoded
from headrace_common.rpc import MethodRef, Req, Res
from headrace_common.session_call import LOOK_AGAIN_S, ClientStream, SessionCall

_CONNECT_TIMEOUT_S = 2.0
# After a try that ran into the timeout, calls fail at once for so long.
_UNREACHABLE_S = 0.5


class SessionClient:
    """Calls to one peer over one stream. Belongs to one event loop.

    Args:
        address: host:port of an `RpcServer`; with grpc:// before it, over gRPC.
        patience_s: how long a peer that owes an answer may be silent when asked for a sign of life;
            None = until its connection is lost.
        silence_s: how long until then; None = the usual.
    """

    def __init__(
        self, address: str, patience_s: float | None = None, silence_s: float | None = None
    ) -> None:
        self.address, self._patience_s, self._silence_s = address, patience_s, silence_s
        self._stream: ClientStream | None = None
        self._ids = itertools.count(1)
        # The try to connect that is under way. All who want to call wait for the same one.
        self._trying: asyncio.Task[ClientStream] | None = None
        self._unreachable_until_s = 0.0
        # The last try got no answer in time (a frozen peer, a cut network): tries go on, whether or
        # not anybody calls, and nobody waits for one before one succeeded. Or nobody listened.
        self._is_silent = self.is_away = False
        self._next_try: asyncio.TimerHandle | None = None

    @property
    def connection(self) -> object | None:
        """What stands for the connection for as long as it lasts; None while there is none."""
        stream = self._stream
        return stream if stream is not None and stream.is_open else None

    async def start(
        self,
        method: MethodRef[Req, Res],
        first: Req | Encoded | None = None,
        *,
        is_only: bool = False,
        timeout_s: float | None = None,
    ) -> SessionCall[Req, Res]:
        """Open a call; further messages are sent by the returned object.

        Args:
            method: which.
            first: the first message, if it is known already.
            is_only: no other follows.
            timeout_s: for the whole call, connecting included; None = no deadline.

        Raises:
            ReplicaLost: the peer refuses connections, did not answer within two seconds, or gave no
                sign of life; the next ones are told so at once, until it answers again.
            Deadline: connecting took the call's whole time.
        """
        stream = self._stream
        if stream is None or not stream.is_open:
            began_s = time.monotonic()
            stream = await self._connected(timeout_s)
            if timeout_s is not None:
                # Nothing is left only where this process stood still.
                timeout_s -= time.monotonic() - began_s
                timeout_s = timeout_s if timeout_s > 0 else LOOK_AGAIN_S
        elif stream.is_silent:
            raise ReplicaLost(f"The peer at {self.address} does not answer.")
        return stream.start(
            method, first, is_only=is_only, timeout_s=timeout_s, patience_s=self._patience_s
        )

    async def unary(
        self, method: MethodRef[Req, Res], request: Req | Encoded, *, timeout_s: float
    ) -> Res:
        """Make one call with one answer.

        Raises:
            HeadraceError: the server's error, `ReplicaLost` or `Deadline`.
        """
        async with await self.start(method, request, is_only=True, timeout_s=timeout_s) as call:
            answer = await call.receive()
            if answer is None:
                raise ReplicaLost("The peer ended the call without an answer.")
            await call.receive()
            return answer

    async def stream(
        self, method: MethodRef[Req, Res], request: Req, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Res]:
        """Make one call with many answers; closing the generator cancels it."""
        async with await self.start(method, request, is_only=True, timeout_s=timeout_s) as call:
            while (answer := await call.receive()) is not None:
                yield answer

    async def close(self) -> None:
        """End all calls and the connection."""
        await cancel_and_wait(self._trying)
        # A try that failed just now has yet to say so: it plans no other.
        self._is_silent = False
        if self._next_try is not None:
            self._next_try.cancel()
        if self._stream is not None:
            await self._stream.close()

    async def _connected(self, within_s: float | None) -> ClientStream:
        """Return an open stream. A caller that gives up does not end the try: others wait too."""
        # Whoever comes just after a failed try need not try again at once.
        if time.monotonic() < self._unreachable_until_s:
            raise ReplicaLost(f"The peer at {self.address} cannot be reached.")
        if self._stream is not None and self._stream.is_silent:
            self._is_silent = True
        trying = self._try()
        if self._is_silent:
            raise ReplicaLost(f"The peer at {self.address} does not answer.")
        try:
            async with awake_timeout(within_s):
                await asyncio.wait({trying})
        except TimeoutError:
            raise Deadline(f"The peer at {self.address} took too long to connect.") from None
        if trying.cancelled():
            raise ReplicaLost("The connection was closed.")
        return trying.result()

    def _try(self) -> asyncio.Task[ClientStream]:
        if self._trying is None:
            self._trying = asyncio.create_task(self._connect())
            self._trying.add_done_callback(self._tried)
        return self._trying

    def _tried(self, trying: asyncio.Task[ClientStream]) -> None:
        self._trying = None
        # Asking for the exception marks it as seen, also if nobody waits any more.
        if not trying.cancelled() and trying.exception() is not None and self._is_silent:
            self._next_try = asyncio.get_running_loop().call_later(_UNREACHABLE_S, self._try)

    async def _connect(self) -> ClientStream:
        if self._stream is not None:
            await self._stream.close()
            self._stream = None
        stream = ClientStream(self.address, self._ids, self._silence_s)
        try:
            async with awake_timeout(_CONNECT_TIMEOUT_S):
                await stream.connect()
            # Only now: a half-made one must not be used by others.
            self._stream = stream
            self._is_silent = self.is_away = False
        except TimeoutError as error:
            self._unreachable_until_s = time.monotonic() + _UNREACHABLE_S
            self._is_silent, self.is_away = True, False
            raise ReplicaLost(f"The peer at {self.address} does not answer.") from error
        except OSError as error:
            # Whoever was silent and now ends connections without a word may still be there.
            self._is_silent &= isinstance(error, ConnectionAbortedError)
            self.is_away = not self._is_silent
            raise ReplicaLost(f"The peer at {self.address} cannot be reached.") from error
        finally:
            if self._stream is not stream:
                await stream.close()
        return stream
