"""Between workers and client: text goes to the guard and comes back once it may go out.

    push(choice, text, last) --> guard --> next_release(): what may be sent, in order

When the guard is lost in the middle, a fail-closed key's answer waits for another one, or for the
same started again or thawed, within a bound: that one reads all of it from its beginning and
goes on where the first had come. With none in time it ends with `GuardUnavailable`. A fail-open
key's answer goes on unguarded, what the guard still held included, and is counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol

from headrace_common.errors import GuardUnavailable, HeadraceError, ReplicaLost
from headrace_common.proto_wire import Encoded, bytes_tag, number_tag, varint, with_length
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_gateway.clients.guard import OutputCall
from headrace_gateway.given_text import GivenText
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal

# After the last text the guard has nothing to wait for.
_LAST_ANSWER_S = 5.0
# Of an answer that is sent whole, the guard gets pieces of so many characters: nobody waits for
# single tokens, and what is blocked is still noticed early.
_PIECE_CHARS = 512
# What is read again comes in pieces that a guard judges in the turn in which they come.
_AGAIN_CHARS = 2048
# Text of one answer that is kept for another guard; a book of 200 pages has half of it. And of one
# that needs no other: more than a guard holds back.
_KEPT_BYTES, _HELD_BYTES = 1_000_000, 16_000

_REQUEST_ID = bytes_tag(pb.OutputOpen.DESCRIPTOR.fields_by_name["request_id"].number)
_TEXT = bytes_tag(pb.CheckOutputRequest.DESCRIPTOR.fields_by_name["text"].number)
_FIELDS = pb.OutputText.DESCRIPTOR.fields_by_name
_CONTENT = bytes_tag(_FIELDS["text"].number)
_CHOICE = number_tag(_FIELDS["choice_idx"].number)
_LAST = number_tag(_FIELDS["last"].number) + varint(1)
_RESUME = bytes_tag(pb.CheckOutputRequest.DESCRIPTOR.fields_by_name["resume"].number)


class OutputOpener(Protocol):
    """What the guard offers here."""

    async def open_output(self, opened: Encoded, *, waits: bool = False) -> OutputCall:
        """Open the check of one answer; a guard may be waited for if there is none."""
        ...


class Release(NamedTuple):
    """Text of one choice that may go to the client."""

    choice_idx: int
    text: str
    is_last: bool = False
    # Nothing more of this choice may ever go out.
    is_blocked: bool = False
    # Something in it was replaced: its tokens no longer match its text.
    is_redacted: bool = False


# What a `Release` holds, and what takes it so: the object is made only for who waits for it.
_Fields = tuple[int, str, bool, bool, bool]
TakeRelease = Callable[[int, str, bool, bool, bool], None]

# Wakes who waits for releases.
_NOTHING = Release(0, "")


class OutputCheck:
    """The check of one answer. `push` and `finish` from one task, `next_release` from another."""

    def __init__(
        self,
        call: OutputCall | None,
        open_again: Callable[[], Awaitable[OutputCall]],
        *,
        is_fail_open: bool,
        metrics: GatewayMetrics,
        is_whole: bool = False,
    ) -> None:
        self._call, self._open_again = call, open_again
        # Text of a whole answer that waits to be a piece, by choice.
        self._gathered: dict[int, str] = {}
        self.is_whole = is_whole
        self._is_fail_open, self._metrics = is_fail_open, metrics
        # If the guard is lost, another gets it, or the client of a fail-open key.
        self._given = GivenText(_HELD_BYTES if is_fail_open else _KEPT_BYTES)
        self._ends: set[int] = set()
        self._over: set[int] = set()
        # Releases that do not come from the guard; None = no more.
        self._unguarded: deque[Release | None] = deque()
        self._has_unguarded = asyncio.Event()
        self._is_finished = False
        # One ended before the text did.
        self.is_lost = False

    @property
    def is_unguarded(self) -> bool:
        """Whether text goes out without the guard."""
        return self._call is None

    @property
    def has_ready(self) -> bool:
        """Whether `next_release` returns without waiting."""
        if self._call is None:
            return bool(self._unguarded)
        return self._call.has_ready

    def push(self, choice_idx: int, text: str, *, is_last: bool) -> None:
        """Give new text of a choice to the guard."""
        if choice_idx in self._over or not (text or is_last):
            return
        if self._call is None:
            self._pass_unguarded(Release(choice_idx, text, is_last))
            return
        if is_last:
            self._ends.add(choice_idx)
        if self.is_whole:
            text = self._gathered.pop(choice_idx, "") + text
            if not is_last and len(text) < _PIECE_CHARS:
                self._gathered[choice_idx] = text
                return
        self._send(self._call, choice_idx, text, is_last=is_last)

    def finish(self) -> None:
        """Say that no text follows."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._call is None:
            self._pass_unguarded(None)
            return
        gathered, self._gathered = self._gathered, {}
        for choice_idx, text in gathered.items():
            self._send(self._call, choice_idx, text, is_last=False)
        _finish(self._call)

    async def next_release(self, shortcut: Shortcut | None = None) -> Release | None:
        """Return what may be sent next; None = everything pushed is through.

        Not a generator: one that is left before its end is closed by a task of its own.

        Args:
            shortcut: takes releases without waking who waits here, who then gets an empty one each
                time that it says no.

        Raises:
            GuardUnavailable: no verdict, and the key is fail-closed.
        """
        while self._call is not None:
            try:
                is_passed = shortcut is not None and not await self._call.wait(shortcut)
                answer = None if is_passed else await self._call.receive()
            except HeadraceError as error:
                await self._go_on_without(error)
                continue
            if is_passed and shortcut is not None:
                shortcut.check()
                return _NOTHING
            if answer is not None:
                return Release(*self._released(answer))
            if self._is_finished and not self._ends:
                return None
            await self._go_on_without(ReplicaLost("The guard ended early."))
        while not self._unguarded:
            self._has_unguarded.clear()
            await self._has_unguarded.wait()
        return self._unguarded.popleft()

    def pass_ready(self, take: TakeRelease) -> None:
        """Pass the guard's releases that are there; the check's end is for `next_release`."""
        if self._call is None:
            return
        for answer in self._call.take_ready():
            take(*self._released(answer))
            # A verdict may end the guarding.
            if self._call is None:
                return

    def close(self) -> None:
        """Let the guard forget the answer."""
        if self._call is not None:
            self._call.cancel()

    def _send(self, call: OutputCall, choice_idx: int, text: str, *, is_last: bool) -> None:
        encoded = text.encode()
        self._given.add(choice_idx, encoded)
        _send(call, choice_idx, encoded, is_last=is_last)

    async def _go_on_without(self, error: HeadraceError) -> None:
        """Go on although the guard is lost."""
        self.is_lost = True
        is_gone = isinstance(error, ReplicaLost)
        if not self._is_fail_open and is_gone and self._given.may_be_given_again():
            try:
                self._call = await self._open_again()
            except HeadraceError as failure:
                error = failure
            else:
                self._give_again(self._call)
                return
        self._go_on_unguarded(error)

    def _give_again(self, call: OutputCall) -> None:
        """Give another guard all of the text; what is out is not released again."""
        for choice_idx, given in self._given:
            if given.released_chars:
                resume = pb.OutputResume(
                    choice_idx=choice_idx, released_chars=given.released_chars
                ).SerializeToString()
                _put(call, _RESUME + with_length(resume))
            text = given.text.decode()
            for at in range(0, len(text), _AGAIN_CHARS):
                _send(call, choice_idx, text[at : at + _AGAIN_CHARS].encode(), is_last=False)
            if choice_idx in self._ends or choice_idx in self._over:
                _send(call, choice_idx, b"", is_last=True)
        if self._is_finished:
            _finish(call)

    def _released(self, answer: pb.CheckOutputResponse) -> _Fields:
        choice_idx, action, is_last = answer.choice_idx, answer.verdict.action, answer.last
        self._given.note(choice_idx, answer.scanned_chars, answer.released_chars)
        if choice_idx in self._over:
            # Its text was only given again.
            return choice_idx, "", False, False, False
        if action == pb.ACTION_UNAVAILABLE:
            # The guard releases no more of this choice.
            self._go_on_unguarded(None, answer.verdict.reason)
            return choice_idx, answer.released, False, False, False
        is_blocked = action == pb.ACTION_BLOCK
        if is_last or is_blocked:
            self._ends.discard(choice_idx)
            self._over.add(choice_idx)
        is_redacted = action == pb.ACTION_REDACT
        return choice_idx, answer.released, is_last, is_blocked, is_redacted

    def _go_on_unguarded(self, cause: HeadraceError | None, why: str = "") -> None:
        # That the guard could not judge is an answer; it counts those itself.
        if cause is not None:
            self._metrics.degraded.labels("guard").inc()
        if not self._is_fail_open:
            message = f"The answer cannot be judged now{f': {why}' if why else ''}."
            raise GuardUnavailable(message, retry_after_s=1.0) from cause
        self.close()
        self._call = None
        # What is left of a whole answer was to be given next.
        for choice_idx, text in self._gathered.items():
            self._given.add(choice_idx, text.encode())
        for choice_idx, given in self._given:
            if choice_idx not in self._over:
                is_last = choice_idx in self._ends
                self._pass_unguarded(Release(choice_idx, given.held(), is_last))
        if self._is_finished:
            self._pass_unguarded(None)

    def _pass_unguarded(self, release: Release | None) -> None:
        self._unguarded.append(release)
        self._has_unguarded.set()


def _send(call: OutputCall, choice_idx: int, encoded: bytes, *, is_last: bool) -> None:
    message = _CONTENT + with_length(encoded) + (_LAST if is_last else b"")
    if choice_idx:
        message += _CHOICE + varint(choice_idx)
    _put(call, _TEXT + with_length(message))


def _put(call: OutputCall, message: bytes) -> None:
    try:
        call.send_encoded(message)
    except ReplicaLost:
        # `next_release` learns the same and decides.
        return


def _finish(call: OutputCall) -> None:
    call.half_close()
    call.end_within(_LAST_ANSWER_S)


class Shortcut:
    """Passes releases on in the turn in which they come from the guard.

    Args:
        check: whose.
        take: gets them.
        try_pass: asked after what came together: whether nobody need be woken for it.
    """

    def __init__(
        self,
        check: OutputCheck,
        take: TakeRelease,
        try_pass: Callable[[], bool],
    ) -> None:
        self._check, self._take, self._try_pass = check, take, try_pass
        self._failure: Exception | None = None

    def __call__(self) -> bool:
        """Take what is there; whether to go on like that."""
        try:
            self._check.pass_ready(self._take)
            return not self._check.is_unguarded and self._try_pass()
        except Exception as error:  # noqa: BLE001 - raised by `check`, where no call is to blame
            self._failure = error
            return False

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure


async def open_output_check(
    guard: OutputOpener,
    principal: Principal,
    request_id: str,
    metrics: GatewayMetrics,
    *,
    is_whole: bool = False,
) -> OutputCheck:
    """Open the check of one answer, streamed or whole, under the key's policy.

    Args:
        guard: judges.
        principal: whose answer it is.
        request_id: of the answer.
        metrics: answers that go unjudged are counted.
        is_whole: nobody reads it before its end.

    Raises:
        GuardUnavailable: the guard cannot be reached, and the key is fail-closed.
    """
    opened = Encoded(_REQUEST_ID + with_length(request_id.encode()) + principal.guard_head)
    call: OutputCall | None = None
    try:
        call = await guard.open_output(opened, waits=not principal.guard_fail_open)
    except HeadraceError as error:
        metrics.degraded.labels("guard").inc()
        if not principal.guard_fail_open:
            raise GuardUnavailable(
                "The answer could not be judged now.", retry_after_s=1.0
            ) from error
    return OutputCheck(
        call,
        partial(guard.open_output, opened, waits=True),
        is_fail_open=principal.guard_fail_open,
        metrics=metrics,
        is_whole=is_whole,
    )
