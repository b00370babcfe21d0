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
_TRACEPARENT = bytes_tag(_FIELDS["traceparent"].number)
_HAS_MESSAGE = number_tag(_FIELDS["has_message"].number) + varint(1)
_IS_LAST = number_tag(_FIELDS["is_last"].number) + varint(1)
_MESSAGE = _KIND + varint(Item.KIND_MESSAGE) + _PAYLOAD


def encoded(item: Item) -> bytes:
    """Return any item as it stands in a frame."""
    return _ITEM + with_length(item.SerializeToString())


def opening(
    call_id: int,
    method: str,
    first: bytes | None,
    timeout_s: float | None,
    traceparent: str,
    *,
    is_only: bool,
) -> bytes:
    """Open a call.

    Args:
        call_id: its own.
        method: full name.
        first: the first message; None = it follows later.
        timeout_s: for the whole call; None = no deadline.
        traceparent: W3C trace context; empty = none.
        is_only: no message follows.
    """
    head = _CALL_ID + varint(call_id) + _opening(method)
    if timeout_s is not None:
        head += _DEADLINE + varint(max(1, int(timeout_s * 1000)))
    if traceparent:
        head += _TRACEPARENT + with_length(traceparent.encode())
    if is_only:
        head += _IS_LAST
    if first is not None:
        head += _HAS_MESSAGE + _PAYLOAD + varint(len(first)) + first
    return _ITEM + varint(len(head)) + head


@lru_cache(maxsize=1024)
def _opening(method: str) -> bytes:
    return Item(kind=Item.KIND_OPEN, method=method, credit=WINDOW).SerializeToString()


def message(call_id: int, payload: bytes, *, is_last: bool = False) -> bytes:
    """Send one message of a call."""
    head = _CALL_ID + varint(call_id) + _MESSAGE + varint(len(payload))
    end = _IS_LAST if is_last else b""
    return b"".join((_ITEM, varint(len(head) + len(payload) + len(end)), head, payload, end))


def signal(call_id: int, kind: Item.Kind.ValueType) -> bytes:
    """Say what needs no more than its kind: HALF_CLOSE, CANCEL, END with OK."""
    return _ITEM + with_length(_CALL_ID + varint(call_id) + _KIND + varint(kind))


def credit(call_id: int, num_messages: int) -> bytes:
    """Let the server send more."""
    return encoded(Item(call_id=call_id, kind=Item.KIND_CREDIT, credit=num_messages))


def failure(call_id: int, status: bytes) -> bytes:
    """End a call with an encoded google.rpc.Status."""
    return encoded(Item(call_id=call_id, kind=Item.KIND_END, status=status))
