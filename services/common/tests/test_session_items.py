"""Items by hand are protobuf's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common import session_items
from headrace_contracts.session.v1.session_pb2 import Frame, Item

IDS = st.integers(1, 2**40)


def read(*items: bytes) -> list[Item]:
    return list(Frame.FromString(b"".join(items)).items)


@given(
    IDS,
    st.none() | st.binary(max_size=300),
    st.none() | st.floats(0.0001, 4e6),
    st.sampled_from(["", "00-1-2-01"]),
    st.booleans(),
)
def test_an_opening_says_all_of_it(
    call_id: int, first: bytes | None, timeout_s: float | None, traceparent: str, is_only: bool
) -> None:
    made = session_items.opening(
        session_items.call_ref(call_id), "a.B/C", first, timeout_s, traceparent, is_only=is_only
    )
    expected = Item(
        call_id=call_id,
        kind=Item.KIND_OPEN,
        method="a.B/C",
        payload=first or b"",
        deadline_ms=0 if timeout_s is None else max(1, int(timeout_s * 1000)),
        traceparent=traceparent,
        credit=session_items.WINDOW,
        has_message=first is not None,
        is_last=is_only,
    )
    assert read(made, made) == [expected, expected]


@given(IDS, st.binary(max_size=300), st.booleans())
def test_a_message(call_id: int, payload: bytes, is_last: bool) -> None:
    made = session_items.message(session_items.call_ref(call_id), payload, is_last=is_last)
    kind = Item.KIND_MESSAGE
    assert read(made) == [Item(call_id=call_id, kind=kind, payload=payload, is_last=is_last)]


@pytest.mark.parametrize("call_id", [1, 127, 128, 20_000, 2**33])
def test_what_has_no_message(call_id: int) -> None:
    call = session_items.call_ref(call_id)
    made = [
        session_items.signal(call, Item.KIND_CANCEL),
        session_items.credit(call, 32),
        session_items.failure(call, b"status"),
    ]
    assert read(*made) == [
        Item(call_id=call_id, kind=Item.KIND_CANCEL),
        Item(call_id=call_id, kind=Item.KIND_CREDIT, credit=32),
        Item(call_id=call_id, kind=Item.KIND_END, status=b"status"),
    ]
