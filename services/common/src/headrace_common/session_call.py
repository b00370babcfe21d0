"""A call on a client's session, and the stream it rides on.

A call, seen from either side::

    OPEN -> MESSAGE* -> HALF_CLOSE        client to server, CANCEL at any time
            MESSAGE* -> END(status)       server to client

An OPEN may carry the first message, and a message may say that it is the last (`is_last`), in place
of the HALF_CLOSE or the END behind it: a call with one message each way is one item each way.
A broken connection ends all its calls with `ReplicaLost`. A client that has something
else to turn to names its patience: a call that has had no answer for a tenth of a second then asks
whether the peer lives at all, by a question that any server answers in the turn in which it comes;
without a sign of life within the patience it fails, and others at once, until something is heard.

Long because a call and the stream it rides on share one protocol.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Generic

from google.rpc import status_pb2

from headrace_common.awake import MAX_STALLS, STALL_S
from headrace_common.deadlines import Deadlines, Waits
from headrace_common.errors import Deadline, HeadraceError, ReplicaLost
from headrace_common.proto_wire import Encoded
from headrace_common.rpc import MethodRef, Req, Res
from headrace_common.rpc_status import from_status
from headrace_common.session_items import WINDOW, call_ref, credit, message, opening, signal
from headrace_common.session_links import link_to
from headrace_common.telemetry import current_traceparent
from headrace_contracts.session.v1.session_pb2 import Frame, Item

_END = Item.KIND_END
_CREDIT_EVERY = WINDOW // 2
# With a patience: a call without an answer for so long looks whether its peer lives.
_LOOK_AFTER_S = 0.1
# A call that waits long looks again and again, and bears seconds of silence: one stall must not
# send everything that queues at a peer elsewhere.
LOOK_AGAIN_S, _LONG_PATIENCE_S = 1.0, 2.0
# `Deadlines` are not so late of themselves.
_LATE_S = 0.3
# No server has this method, and each says so at once.
_LIFE = "headrace.session.v1.Session/IsAlive"


class SessionCall(Generic[Req, Res]):
    """One running call on a client's session. Use as an async context manager.

    Leaving the block before the end cancels the call at the server. Not safe for several readers.
    """

    __slots__ = (
        "_due_s",
        "_ended",
        "_id",
        "_is_noted",
        "_is_over_there",
        "_is_told",
        "_loop",
        "_messages",
        "_parse",
        "_patience_s",
        "_session",
        "_shortcut",
        "_then",
        "_told",
        "_unacknowledged",
        "_waiter",
        "_waits",
        "first_answer_s",
        "ref",
    )

    def __init__(
        self,
        session: ClientStream,
        call_id: int,
        method: MethodRef[Req, Res],
        timeout_s: float | None,
        patience_s: float | None = None,
    ) -> None:
        self._session, self._id, self._parse = session, call_id, method.response.FromString
        self.ref, self._loop = call_ref(call_id), session.loop
        # As they came, not yet taken.
        self._messages: list[bytes] = []
        # Whether an end was told that nobody has read yet, and what was wrong; None = nothing.
        self._is_told = False
        self._told: HeadraceError | None = None
        # Whoever waits in `receive` or `wait`, and what `wait` wants called instead of waking it.
        self._waiter: asyncio.Future[bool] | None = None
        self._shortcut: Callable[[], bool] | None = None
        self._is_noted = False
        self._unacknowledged = 0
        self._ended = False
        # The server has told its end, read or not: nothing need be told to it any more.
        self._is_over_there = False
        # Monotonic time at which the first answer came; None = none yet.
        self.first_answer_s: float | None = None
        # One for the call's life costs less than one for each message; and what stands there.
        self._waits: Waits | None = None
        self._then: Callable[[], None] = _nothing
        self._due_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._patience_s = patience_s
        self._begin_waiting()

    async def __aenter__(self) -> SessionCall[Req, Res]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def send(self, message: Req) -> None:
        """Queue a message for the server.

        Raises:
            ReplicaLost: the stream is gone.
        """
        self.send_encoded(message.SerializeToString())

    def send_encoded(self, encoded: bytes) -> None:
        """Queue a message that is on the wire already (`proto_wire`).

        Raises:
            ReplicaLost: the stream is gone.
        """
        self._session.put(message(self.ref, encoded))

    def half_close(self) -> None:
        """Tell the server that no message follows."""
        self._signal(Item.KIND_HALF_CLOSE)

    def cancel(self) -> None:
        """End the call now. Nothing happens if it has ended."""
        if self._ended:
            return
        self._end()
        self._signal(Item.KIND_CANCEL)

    def finish(self) -> None:
        """End the call from this side: the server takes what was sent, then ends regularly.

        What it still answers is dropped. Nothing happens if the call has ended.
        """
        if not self._ended:
            self.half_close()
            self._end()

    def end_within(self, timeout_s: float) -> None:
        """Give a call that is under way and has no deadline one, as if it had been started so."""
        if not self._ended:
            self._stop_waiting()
            self._due_s = self._loop.time() + timeout_s
            self._begin_waiting()

    @property
    def has_ready(self) -> bool:
        """Whether `receive` returns without waiting."""
        return bool(self._messages) or self._is_told

    async def receive(self) -> Res | None:
        """Return the next message, or None at the call's regular end.

        Raises:
            HeadraceError: the server's error, `ReplicaLost` or `Deadline`.
        """
        while not self._messages and not self._is_told:
            if self._ended:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._messages:
            self._unacknowledged += 1
            if self._unacknowledged >= _CREDIT_EVERY:
                self._acknowledge()
            return self._parse(self._messages.pop(0))
        told, self._told, self._is_told = self._told, None, False
        self._end()
        if told is not None:
            raise told
        return None

    async def wait(self, shortcut: Callable[[], bool]) -> bool:
        """Wait for something to `receive` that *shortcut* does not take.

        While this waits, messages wake nobody: *shortcut* is called in the turn in which they came,
        once for what came together. It takes them by `take_ready` and says whether to go on like
        that; what it raises is raised here.

        Returns:
            Whether there is something to receive; False = the shortcut wants no more now.
        """
        while not self.has_ready and not self._ended:
            self._waiter, self._shortcut = self._loop.create_future(), shortcut
            try:
                if not await self._waiter:
                    return False
            finally:
                self._waiter = self._shortcut = None
        return True

    def take_ready(self) -> list[Res]:
        """Return the messages that are there; the call's end and errors are `receive`'s."""
        messages, self._messages = self._messages, []
        self._unacknowledged += len(messages)
        if self._unacknowledged >= _CREDIT_EVERY:
            self._acknowledge()
        return list(map(self._parse, messages))

    async def __aiter__(self) -> AsyncIterator[Res]:
        while (message := await self.receive()) is not None:
            yield message

    def deliver(self, item: Item) -> None:
        """Hand over what the stream's reader got."""
        if self.first_answer_s is None:
            self.first_answer_s = time.monotonic()
        if item.kind == _END:
            self._is_told = self._is_over_there = True
            told = item.status
            self._told = from_status(status_pb2.Status.FromString(told)) if told else None
        else:
            self._messages.append(item.payload)
            if item.is_last:
                self._is_told = self._is_over_there = True
        if self._shortcut is None:
            self._wake()
        elif not self._is_noted:
            self._is_noted = True
            self._session.noted.append(self)

    def fail(self, error: HeadraceError) -> None:
        """End the call badly, once what came before is taken."""
        if self.first_answer_s is None:
            self.first_answer_s = time.monotonic()
        if not self._is_told:
            self._is_told, self._told = True, error
        self._wake()

    def pass_on(self) -> None:
        """Let the waiter's shortcut take what came."""
        self._is_noted = False
        waiter, shortcut = self._waiter, self._shortcut
        if waiter is None or waiter.done() or shortcut is None:
            return
        try:
            goes_on = shortcut()
        except Exception as error:  # noqa: BLE001 - the waiter's own, handed to it
            waiter.set_exception(error)
            return
        if not goes_on:
            waiter.set_result(False)
        elif self._messages or self._is_told:
            waiter.set_result(True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _begin_waiting(self) -> None:
        if self._patience_s is None or self.first_answer_s is not None:
            self._wait_for_end()
        else:
            self._wait_for(_LOOK_AFTER_S, self._look)

    def _wait_for_end(self) -> None:
        if self._due_s is not None:
            self._set_deadline(self._due_s - self._loop.time(), self._run_out)

    def _wait_for(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do *what* later, unless the call's time is over by then."""
        if self._due_s is not None and self._due_s <= self._loop.time() + delay_s:
            self._wait_for_end()
        else:
            self._set_deadline(delay_s, what)

    def _set_deadline(self, delay_s: float, what: Callable[[], None]) -> None:
        self._then, self._waits = what, self._session.deadlines.add(delay_s, what)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.discard(self._then)
            self._waits = None
        # It holds the call, as the call does it.
        self._then = _nothing

    def _look(self) -> None:
        """See whether a peer that has not answered lives at all."""
        if self.first_answer_s is not None or self._patience_s is None:
            self._wait_for_end()
            return
        asked_s, due_s = self._session.ask_for_life(), self._loop.time() + self._patience_s
        self._wait_for(self._patience_s, lambda: self._judge(asked_s, due_s))

    def _judge(self, asked_s: float, due_s: float) -> None:
        if self.first_answer_s is not None:
            self._wait_for_end()
        elif self._session.heard_s >= asked_s:
            self._patience_s = _LONG_PATIENCE_S
            self._wait_for(LOOK_AGAIN_S, self._look)
        elif self._loop.time() - due_s >= STALL_S:
            # This process did not run: the sign of life may lie unread.
            self._look()
        else:
            self._session.silent_at_s = self._loop.time()
            self.cancel()
            self.fail(ReplicaLost("The peer gives no sign of life."))

    def _run_out(self, num_stalls: int = 0) -> None:
        now_s = self._loop.time()
        if self._due_s is not None and now_s - self._due_s >= _LATE_S and num_stalls < MAX_STALLS:
            # Nor did it now: the answer may lie unread, or the question unsent.
            self._due_s = now_s + LOOK_AGAIN_S
            self._set_deadline(LOOK_AGAIN_S, partial(self._run_out, num_stalls + 1))
            return
        self.cancel()
        self.fail(Deadline("The peer took too long."))

    def _end(self) -> None:
        self._ended = True
        self._session.calls.pop(self._id, None)
        self._stop_waiting()

    def _acknowledge(self) -> None:
        """Let the server send more for those that were taken."""
        if self._is_heard:
            self._session.put(credit(self.ref, self._unacknowledged))
        self._unacknowledged = 0

    @property
    def _is_heard(self) -> bool:
        """Whether the server still listens. If the stream is gone, the reader learns it."""
        return not self._is_over_there and self._session.is_open

    def _signal(self, kind: Item.Kind.ValueType) -> None:
        if self._is_heard:
            self._session.put(signal(self.ref, kind))


def _nothing() -> None:
    """Nothing is waited for."""


def _refuse(_item: bytes) -> None:
    raise ReplicaLost("The connection to the peer is gone.")


class ClientStream:
    """One life of a client's connection, and the calls on it."""

    def __init__(self, address: str, ids: Iterator[int], silence_s: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._ids = ids
        self.deadlines = Deadlines(self.loop)
        self.calls: dict[int, SessionCall[Any, Any]] = {}  # Any: whatever messages they have
        self._link = link_to(address, self._take, self._fail, silence_s)
        # Adds an item to the next frame, or raises `ReplicaLost`.
        self.put: Callable[[bytes], None] = _refuse
        # Calls that have a shortcut for what the present frame brought.
        self.noted: list[SessionCall[Any, Any]] = []
        # From the first answer until the connection is lost.
        self.is_open = False
        self._asked_s = -math.inf
        # When the peer gave no sign of life in time.
        self.silent_at_s = -math.inf

    @property
    def heard_s(self) -> float:
        """Loop time at which the peer last said anything."""
        return self._link.heard_s

    @property
    def is_silent(self) -> bool:
        """Whether it gave no sign of life when it was asked, nor since."""
        return self.silent_at_s > self._link.heard_s

    def ask_for_life(self) -> float:
        """Return the loop time from which on anything heard is a sign of life; ask if needed."""
        now_s, heard_s = self.loop.time(), self._link.heard_s
        if now_s - heard_s < _LOOK_AFTER_S:
            return heard_s
        if self._asked_s <= heard_s and self.is_open:
            self._asked_s = now_s
            self.put(opening(call_ref(next(self._ids)), _LIFE, None, None, "", is_only=True))
        return self._asked_s

    def start(
        self,
        method: MethodRef[Req, Res],
        first: Req | Encoded | None,
        *,
        is_only: bool,
        timeout_s: float | None,
        patience_s: float | None,
    ) -> SessionCall[Req, Res]:
        """Open a call; see `SessionClient.start`."""
        call_id = next(self._ids)
        call = SessionCall(self, call_id, method, timeout_s, patience_s)
        self.calls[call_id] = call
        self.put(
            opening(
                call.ref,
                method.name,
                None if first is None else first.SerializeToString(),
                timeout_s,
                current_traceparent(),
                is_only=is_only,
            )
        )
        return call

    async def connect(self) -> None:
        """Connect, and wait until the peer has answered.

        Raises:
            OSError: it cannot be reached.
        """
        await self._link.connect()
        if self._link.is_open:
            self.is_open, self.put = True, self._link.put

    async def close(self) -> None:
        """End the connection and all calls on it."""
        await self._link.close()
        self._fail()

    def _take(self, frame: Frame) -> None:
        calls = self.calls
        for item in frame.items[:]:  # a list: protobuf's iterators end by an exception
            call = calls.get(item.call_id)
            if call is not None:
                call.deliver(item)
        if self.noted:
            noted, self.noted = self.noted, []
            for call in noted:
                call.pass_on()

    def _fail(self) -> None:
        self.is_open, self.put = False, _refuse
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.fail(ReplicaLost("The connection to the peer broke."))
        self.deadlines.close()
