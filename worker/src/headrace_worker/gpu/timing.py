"""Times of work on the GPU, and the device's limits by them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from headrace_worker.gpu.roofline import Roofline

Run = Callable[[], object]
# Returns the seconds that something takes.
Timer = Callable[[Run], float]

_RUNS, _TRIALS = 20, 3
# More than any device's last cache.
_FLUSH_BYTES = 512 << 20
_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192


class GpuTimer:
    """Times work as the device sees it: recorded, with a cold cache, without the launching CPU."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, run: Run) -> float:
        """Return the median time of *run* in seconds; it must not wait for the device itself."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own is untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_TRIALS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self.replays_s(graph.replay)

    def replays_s(self, replay: Run) -> float:
        """Return the median time of launches that cost the CPU next to nothing."""
        times: list[float] = []
        for _ in range(_RUNS):
            start, end = _event(), _event()
            # While the device writes this, the CPU gets ahead of it.
            self._flush.zero_()
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def measured_roofline(timer: Timer) -> Roofline:
    """Measure a large copy and a large product."""
    return Roofline(2 * _COPY_BYTES / _copy_s(timer), 2 * _MATRIX_SIZE**3 / _product_s(timer))


def _copy_s(timer: Timer) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))


def _product_s(timer: Timer) -> float:
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return timer(lambda: torch.mm(left, right, out=out))
