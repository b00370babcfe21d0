"""The outbox's files: append-only segments of checksummed frames.

A segment is named after the sequence number of its first event. A frame is length (u32 LE), CRC-32
of the payload (u32 LE), payload. Whatever is not a whole, matching frame ends the segment: a crash
can tear only the tail of the last write, and after a failed write a new segment is begun. A length
of zero is never written, so a tail of zeros (some file systems leave one) is no frame either.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<II")
MAX_PAYLOAD_BYTES = 64 * 1024
_READ_BYTES = 4 * MAX_PAYLOAD_BYTES
_SUFFIX = ".seg"


@dataclass(frozen=True, order=True)
class Position:
    """A place between two frames: segment (by its first sequence number) and byte offset."""

    segment: int
    offset: int


def encode_frame(payload: bytes) -> bytes:
    """Wrap one payload.

    Raises:
        ValueError: the payload is empty or above `MAX_PAYLOAD_BYTES`.
    """
    if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame holds 1 to {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def decode_frames(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield (payload, offset behind it) for each whole frame; stop at the first that is not."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, crc = _HEADER.unpack_from(data, offset)
        begin, end = offset + _HEADER.size, offset + _HEADER.size + length
        if not 0 < length <= MAX_PAYLOAD_BYTES or end > len(data):
            return
        payload = data[begin:end]
        if zlib.crc32(payload) != crc:
            return
        yield payload, end
        offset = end


def segment_path(folder: Path, segment: int) -> Path:
    """Return the file of the segment whose first sequence number is *segment*."""
    return folder / f"{segment:020d}{_SUFFIX}"


def list_segments(folder: Path) -> list[int]:
    """Return the segments in the folder, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def read_frames(
    folder: Path, start: Position, end_offset: int, max_frames: int
) -> tuple[list[bytes], int]:
    """Read up to *max_frames* payloads of one segment from *start*, not beyond *end_offset*.

    Returns:
        The payloads (none: end of the segment, or a bad frame) and the offset behind the last.
    """
    with segment_path(folder, start.segment).open("rb") as file:
        file.seek(start.offset)
        data = file.read(max(0, min(_READ_BYTES, end_offset - start.offset)))
    payloads, offset = [], start.offset
    for payload, end in decode_frames(data):
        payloads.append(payload)
        offset = start.offset + end
        if len(payloads) == max_frames:
            break
    return payloads, offset


def read_segment(folder: Path, segment: int) -> Iterator[bytes]:
    """Yield all payloads of a segment that nobody writes to any more."""
    data = segment_path(folder, segment).read_bytes()
    for payload, _ in decode_frames(data):
        yield payload


def repair(folder: Path, segment: int) -> int:
    """Cut what follows the last whole frame, and sync the rest. Returns the bytes cut.

    What is cut is kept beside the segment, as `<segment>.cut`: if it should ever be more than the
    tail of a write that nobody was told of, somebody will want to look at it.
    """
    path = segment_path(folder, segment)
    data = path.read_bytes()
    good = 0
    for _, end in decode_frames(data):
        good = end
    if good < len(data):
        path.with_suffix(".cut").write_bytes(data[good:])
    with path.open("r+b") as file:
        file.truncate(good)
        os.fdatasync(file.fileno())
    return len(data) - good


def sync_folder(folder: Path) -> None:
    """Make creations, renames and deletions in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Replace a small file in one step; a reader sees the old or the new content.

    After a crash of the machine too, if it *is_synced*.
    """
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        if is_synced:
            os.fdatasync(file.fileno())
    fresh.replace(path)


class SegmentWriter:
    """Appends to one new segment. One thread at a time; every call may block on the disk.

    Args:
        folder: the outbox's folder.
        segment: sequence number of the first event to come.
    """

    def __init__(self, folder: Path, segment: int) -> None:
        self.segment = segment
        self.size_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._fd = os.open(segment_path(folder, segment), flags, 0o600)
        sync_folder(folder)

    def append(self, frames: bytes) -> None:
        """Write and sync all of *frames*, or raise OSError and leave none, as far as the disk lets.

        After an error the segment must not be appended to: close it and begin another.
        """
        try:
            view = memoryview(frames)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(frames)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
