"""Workers of one machine leave cores to one another."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from headrace_worker.kernels.compiler import default_cache_dir, ensure_compiled
from headrace_worker.kernels.cores import NUM_SEATS, take_seat

_STALE_S = 0.25


@pytest.mark.parametrize("cores", [(), (0,)])
def test_each_worker_has_a_seat_of_its_own(tmp_path: Path, cores: tuple[int, ...]) -> None:
    """Seats differ, are free again when left, and belong to one set of cores."""
    own_cores = os.sched_getaffinity(0)
    first, second = take_seat(tmp_path), take_seat(tmp_path)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    assert first.num_cores == len(own_cores)
    del first
    third = take_seat(tmp_path)
    assert third is not None
    assert third.number == 0
    if cores and len(own_cores) > 1:
        os.sched_setaffinity(0, {min(own_cores)})
        try:
            other = take_seat(tmp_path)
        finally:
            os.sched_setaffinity(0, own_cores)
        assert other is not None
        assert (other.number, other.num_cores) == (0, 1)


def test_no_seat_is_no_harm(tmp_path: Path) -> None:
    """Without a folder, or with all seats taken, a worker does without."""
    assert take_seat(tmp_path / "absent") is None
    seats = [take_seat(tmp_path) for _ in range(NUM_SEATS)]
    assert None not in seats
    assert take_seat(tmp_path) is None


@pytest.mark.parametrize(
    ("num_cores", "busy", "seat", "share"),
    [(2, (), 0, 2), (2, (1,), 0, 1), (8, (1, 2), 0, 3), (8, (0, 1), 2, 2), (2, (0, 1, 2), 3, 1)],
)
def test_a_share_is_what_busy_neighbours_leave(
    num_cores: int, busy: tuple[int, ...], seat: int, share: int
) -> None:
    """Cores over busy workers, the rest to the first of them; who has long said nothing is gone."""
    library = ctypes.CDLL(str(ensure_compiled(default_cache_dir())))
    library.claim_cores.restype = ctypes.c_int64
    now_ns = time.monotonic_ns()
    stamps = (ctypes.c_int64 * NUM_SEATS)()
    for number in busy:
        stamps[number] = now_ns - 1000
    stamps[NUM_SEATS - 1] = now_ns - int(_STALE_S * 1e9) - 1

    class Cores(ctypes.Structure):
        _fields_ = (
            ("stamps", ctypes.c_void_p),
            ("seat", ctypes.c_int64),
            ("num_cores", ctypes.c_int64),
        )

    cores = Cores(ctypes.addressof(stamps), seat, num_cores)
    assert library.claim_cores(ctypes.byref(cores), ctypes.c_int64(now_ns)) == share
    assert stamps[seat] == now_ns
    # Its cores are kept for it between two steps, and are the others' soon after.
    library.leave_cores(ctypes.byref(cores), ctypes.c_int64(now_ns))
    neighbour = Cores(ctypes.addressof(stamps), NUM_SEATS - 2, 64)
    for later_ms, num_busy in ((19, len(busy) + 2), (21, len(busy) + 1)):
        then_ns = ctypes.c_int64(now_ns + later_ms * 1_000_000)
        share = 64 // num_busy
        assert library.claim_cores(ctypes.byref(neighbour), then_ns) == share
