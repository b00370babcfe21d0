"""Protobuf's wire format by hand, for messages that only wrap others.

Making a message of messages copies each of them: it is written and parsed anew at every level. On
the hot path a wrapper is put together of what its parts are on the wire instead, which costs a
fifth. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

_VARINT, _LEN = 0, 2
# Most are lengths of messages.
_SHORT = tuple(
    bytes((number,)) if number < 128 else bytes((number & 127 | 128, number >> 7))
    for number in range(2048)
)


def varint(number: int) -> bytes:
    """Encode a number that is not negative."""
    if number < 2048:
        return _SHORT[number]
    if number < 16384:
        return bytes((number & 127 | 128, number >> 7))
    if number < 2097152:
        return bytes((number & 127 | 128, number >> 7 & 127 | 128, number >> 14))
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_tag(field: int) -> bytes:
    """Return what stands before an unsigned number or an enum, itself a varint, of a field."""
    return varint(field << 3 | _VARINT)


def bytes_tag(field: int) -> bytes:
    """Return what stands before a message, string or bytes of a field, before its length."""
    return varint(field << 3 | _LEN)


def with_length(encoded: bytes) -> bytes:
    """Put the length before a message that follows its `bytes_tag`."""
    size = len(encoded)
    return (_SHORT[size] if size < 2048 else varint(size)) + encoded


class Encoded:
    """A message that is on the wire already; stands in for it where messages are sent."""

    __slots__ = ("_encoded",)

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return the bytes."""
        return self._encoded
