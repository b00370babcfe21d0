"""The items of session frames, put on the wire where they are made.

A frame is nothing but its items, one behind the other, so that no message of messages is ever made
(`proto_wire`). What is the same for all calls of a method is prepared once.
"""

from __future__ import annotations

from functools import lru_cache

from headrace_common.proto_wire import bytes_tag, number_tag, varint, with_length
from headrace_contracts.session.v1.session_pb2 import Frame, Item

# Messages a server may send before the reader has taken any.
WINDOW = 64

_FIELDS = Item.DESCRIPTOR.fields_by_name
_ITEM = bytes_tag(Frame.DESCRIPTOR.fields_by_name["items"].number)
_CALL_ID, _KIND, _CREDIT = (number_tag(_FIELDS[it].number) for it in ("call_id", "kind", "credit"))
_PAYLOAD = bytes_tag(_FIELDS["payload"].number)
_DEADLINE = number_tag(_FIELDS["deadline_ms"].number)
_IS_LAST = number_tag(_FIELDS["is_last"].number) + varint(1)
# Each before a message's length.
_FIRST = number_tag(_FIELDS["has_message"].number) + varint(1) + _PAYLOAD
_MESSAGE = _KIND + varint(Item.KIND_MESSAGE) + _PAYLOAD
_LAST_MESSAGE = _IS_LAST + _MESSAGE


def encoded(item: Item) -> bytes:
    """Return any item as it stands in a frame."""
    return _ITEM + with_length(item.SerializeToString())


def call_ref(call_id: int) -> bytes:
    """Return a call's id as its items carry it."""
    return _CALL_ID + varint(call_id)


def opening(
    call: bytes,
    method: str,
    first: bytes | None,
    timeout_s: float | None,
    traceparent: str,
    *,
    is_only: bool,
) -> bytes:
    """Open a call.

    Args:
        call: its `call_ref`.
        method: full name.
        first: the first message; None = it follows later.
        timeout_s: for the whole call; None = no deadline.
        traceparent: W3C trace context; empty = none.
        is_only: no message follows.
    """
    item = call + _opening(method, traceparent)
    if timeout_s is not None:
        item += _DEADLINE + varint(max(1, int(timeout_s * 1000)))
    if is_only:
        item += _IS_LAST
    if first is not None:
        item += _FIRST + with_length(first)
    return _ITEM + with_length(item)


# Traces that are not recorded share one context.
@lru_cache(maxsize=1024)
def _opening(method: str, traceparent: str) -> bytes:
    item = Item(kind=Item.KIND_OPEN, method=method, credit=WINDOW, traceparent=traceparent)
    return item.SerializeToString()


def message(call: bytes, payload: bytes, *, is_last: bool = False) -> bytes:
    """Send one message of a call."""
    item = call + (_LAST_MESSAGE if is_last else _MESSAGE) + with_length(payload)
    return _ITEM + with_length(item)


def signal(call: bytes, kind: Item.Kind.ValueType) -> bytes:
    """Say what needs no more than its kind: HALF_CLOSE, CANCEL, END with OK."""
    return _ITEM + with_length(call + _KIND + varint(kind))


def credit(call: bytes, num_messages: int) -> bytes:
    """Let the server send more."""
    item = Item(kind=Item.KIND_CREDIT, credit=num_messages)
    return _ITEM + with_length(call + item.SerializeToString())


def failure(call: bytes, status: bytes) -> bytes:
    """End a call with an encoded google.rpc.Status."""
    item = Item(kind=Item.KIND_END, status=status)
    return _ITEM + with_length(call + item.SerializeToString())
