"""Tests of the frames and files of the outbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.segments import (
    Position,
    SegmentWriter,
    decode_frames,
    encode_frame,
    list_segments,
    read_frames,
    read_segment,
    repair,
    segment_path,
)

PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


@given(PAYLOADS, st.integers(0, 400))
def test_a_cut_keeps_exactly_the_whole_frames_before_it(payloads: list[bytes], cut: int) -> None:
    """Wherever a write is torn, every frame before the tear is read and nothing else."""
    data = b"".join(map(encode_frame, payloads))[:cut]
    whole, size = [], 0
    for payload in payloads:
        size += len(encode_frame(payload))
        if size <= cut:
            whole.append(payload)
    assert [payload for payload, _ in decode_frames(data)] == whole


@given(PAYLOADS, PAYLOADS, st.data())
def test_a_flipped_bit_ends_the_segment(
    before: list[bytes], after: list[bytes], data: st.DataObject
) -> None:
    """A frame with any bit changed is never taken for an event."""
    good = b"".join(map(encode_frame, before))
    bad = bytearray(encode_frame(b"the event that is hit"))
    bit = data.draw(st.integers(0, len(bad) * 8 - 1))
    bad[bit // 8] ^= 1 << (bit % 8)
    stream = good + bytes(bad) + b"".join(map(encode_frame, after))
    assert [payload for payload, _ in decode_frames(stream)][: len(before)] == before
    assert len(list(decode_frames(stream))) == len(before)


def test_zeros_at_the_end_are_no_frame() -> None:
    """Some file systems leave a tail of zeros after a crash."""
    data = encode_frame(b"x") + bytes(64)
    assert [payload for payload, _ in decode_frames(data)] == [b"x"]


@pytest.mark.parametrize("payload", [b"", bytes(64 * 1024 + 1)])
def test_refuses_payloads_that_could_not_be_read_again(payload: bytes) -> None:
    """Length zero and oversize are not frames, so they must not be written."""
    with pytest.raises(ValueError, match="a frame holds"):
        encode_frame(payload)


def test_repair_cuts_the_tail_and_keeps_it_aside(tmp_path: Path) -> None:
    """What is cut is not destroyed."""
    writer = SegmentWriter(tmp_path, 1)
    writer.append(encode_frame(b"one"))
    writer.close()
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(b"half a fr")
    assert repair(tmp_path, 1) == 9
    assert list(read_segment(tmp_path, 1)) == [b"one"]
    assert segment_path(tmp_path, 1).with_suffix(".cut").read_bytes() == b"half a fr"
    assert list_segments(tmp_path) == [1]
    assert repair(tmp_path, 1) == 0


def test_reading_goes_on_behind_the_last_frame_and_not_beyond_what_is_durable(
    tmp_path: Path,
) -> None:
    """A reader sees only synced bytes, each once."""
    writer = SegmentWriter(tmp_path, 7)
    frames = [encode_frame(bytes([i]) * 10) for i in range(1, 6)]
    writer.append(b"".join(frames))
    writer.close()
    durable = len(b"".join(frames[:4]))
    first, offset = read_frames(tmp_path, Position(7, 0), durable, 3)
    rest, end = read_frames(tmp_path, Position(7, offset), durable, 3)
    assert [p[0] for p in first] == [1, 2, 3]
    assert [p[0] for p in rest] == [4]
    assert end == durable
    assert read_frames(tmp_path, Position(7, end), durable, 3) == ([], durable)
