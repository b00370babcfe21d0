"""Tests of the wire format by hand, against protobuf's own."""

from __future__ import annotations

import pytest

from headrace_common.proto_wire import Encoded, bytes_tag, number_tag, varint, with_length
from headrace_contracts.session.v1.session_pb2 import Frame, Item


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 16383, 16384, 2**32, 2**64 - 1])
def test_a_number_reads_as_it_was(number: int) -> None:
    """At each border of a varint's length."""
    assert Item.FromString(number_tag(1) + varint(number)).call_id == number


@pytest.mark.parametrize("size", [0, 127, 128, 20_000])
def test_a_wrapper_by_hand_is_protobufs_own(size: int) -> None:
    """The wrapper's bytes are those that protobuf makes, whatever the part's length."""
    item = Item(call_id=7, payload=b"x" * size)
    by_hand = Encoded(bytes_tag(1) + with_length(item.SerializeToString()))
    assert by_hand.SerializeToString() == Frame(items=[item]).SerializeToString()


def test_fields_above_15_have_longer_tags() -> None:
    """Field 16 is the first whose tag takes two bytes."""
    assert number_tag(16) == b"\x80\x01"
    assert bytes_tag(16) == b"\x82\x01"
