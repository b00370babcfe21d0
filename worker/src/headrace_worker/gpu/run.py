"""All checks, and all figures; see `headrace_worker.gpu.__main__`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch

from headrace_worker.gpu import device as gpu
from headrace_worker.gpu import kernel_check, model_check, report
from headrace_worker.gpu.kernel_bench import BenchSizes, kernel_cases, timed
from headrace_worker.gpu.kernel_check import Check
from headrace_worker.gpu.model_bench import Load, decode_steps, engine_rates, large_model
from headrace_worker.gpu.timing import GpuTimer, measured_roofline
from headrace_worker.gpu.tune import tuned
from headrace_worker.kernels.dispatch import kernels_for
from headrace_worker.kernels.triton import tuning as tables
from headrace_worker.model.weights import Placement

_PLACEMENT = Placement("cuda", torch.bfloat16)


def all_checks(device: torch.device) -> Iterable[Check]:
    """Yield what *check* runs on a GPU."""
    kernels = kernels_for("triton", device)
    yield from kernel_check.kernel_checks(device, kernel_check.ON_GPU, kernels)
    yield from model_check.model_checks(device, model_check.ON_GPU)


def check_gpu() -> int:
    """Run all checks on the GPU; 0 = all hold."""
    return int(check(all_checks(torch.device("cuda"))) > 0)


def check(checks: Iterable[Check]) -> int:
    """Run all, go on after one that fails, and return how many failed."""
    num_checks, failed = 0, []
    for each in checks:
        num_checks += 1
        started_s = time.perf_counter()
        try:
            each.run()
            result = "ok"
        except Exception as error:  # noqa: BLE001 - edge: one failure shall not hide the others
            failed.append(each.name)
            result = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        _say(f"{each.name}: {result} ({time.perf_counter() - started_s:.1f} s)")
    _say(f"{num_checks} checks, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    return len(failed)


def bench(device: gpu.Device, folder: Path, is_tuning: bool) -> int:
    """Measure everything and write it down; the whole takes some minutes."""
    timer, cuda = GpuTimer(), torch.device("cuda")
    limits = measured_roofline(timer)
    _say(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s")
    _say(f"products {limits.matrix_flop_per_s / 1e12:.0f} TFLOP/s")
    cases = [*kernel_cases(BenchSizes())]
    tuning = tables.tuning_of(cuda)
    if is_tuning:
        tuning = tuned(cases, timer, cuda)
        for place in (tables.FOLDER, folder / "tuning"):
            path = tables.table_path(device.name, place)
            tables.write(path, tuning)
            _say(f"wrote {path}")
    kernels = []
    for case in cases:
        kernels.append(timed(case, timer, limits, tuning, cuda))
        _say(f"{kernels[-1]}")
    # The runner reads the table that has just been written.
    model = large_model(_PLACEMENT)
    steps = decode_steps(model, _PLACEMENT, Load(), limits)
    for step in steps:
        _say(f"{step}")
    rates = engine_rates(model, _PLACEMENT, Load())
    _say(f"{rates}")
    today = datetime.now(UTC).date()
    result = report.Report(today, device, limits, kernels, steps, rates)
    for path in report.write(result, folder):
        _say(f"wrote {path}")
    _say(f"missed: {', '.join(result.missed) or 'nothing'}")
    return int(bool(result.missed))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
