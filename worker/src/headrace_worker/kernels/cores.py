"""How workers of one machine share its cores: each sees which of the others compute right now.

They do by a file of time stamps that they all map, one for each worker; see `cpu/cores.c`. While
its neighbours rest a worker computes with all its threads, while they compute with its share.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import weakref
from pathlib import Path

# As in cores.h.
NUM_SEATS = 64
_NUM_BYTES = 8 * NUM_SEATS
_log = logging.getLogger(__name__)


class Seat:
    """One worker's place in the file, until the object goes.

    Args:
        descriptor: of the file; holds the lock on the seat.
        number: which stamp is this worker's.
        num_cores: that all workers of the file share.
    """

    def __init__(self, descriptor: int, number: int, num_cores: int) -> None:
        self._mapped = mmap.mmap(descriptor, _NUM_BYTES)
        self._close = weakref.finalize(self, os.close, descriptor)
        # The mapped file, for C.
        self.stamps = (ctypes.c_char * _NUM_BYTES).from_buffer(self._mapped)
        self.number, self.num_cores = number, num_cores


def take_seat(folder: Path) -> Seat | None:
    """Sit down among the workers of *folder* and the same cores; None where that cannot be."""
    if not hasattr(fcntl, "F_OFD_SETLK"):  # only Linux has locks that belong to an open file
        return None
    own_cores = sorted(os.sched_getaffinity(0))
    name = hashlib.sha256(str(own_cores).encode()).hexdigest()[:8]
    try:
        descriptor = os.open(folder / f"cores-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    try:
        number = _free_seat(descriptor)
        if number is not None:
            os.truncate(descriptor, _NUM_BYTES)
            return Seat(descriptor, number, len(own_cores))
    except OSError as error:
        _log.warning("computing without regard to other workers: %s", error)
    os.close(descriptor)
    return None


def _free_seat(descriptor: int) -> int | None:
    """Lock a byte that nobody else has locked; the lock goes with the file or its process."""
    for number in range(NUM_SEATS):
        # struct flock: type, whence, start, length, pid.
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            continue
        return number
    return None
