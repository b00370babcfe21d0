"""What a benchmark on a GPU does besides timing: cases, goals, cuts, report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch

from headrace_common.errors import Unavailable
from headrace_worker.gpu import report
from headrace_worker.gpu.__main__ import main
from headrace_worker.gpu.device import Device, require
from headrace_worker.gpu.kernel_bench import (
    BenchSizes,
    KernelCase,
    KernelTime,
    best_cut,
    kernel_cases,
    timed,
)
from headrace_worker.gpu.model_bench import EngineRates, StepTime
from headrace_worker.gpu.operands import Heads
from headrace_worker.gpu.report import Report
from headrace_worker.gpu.roofline import Roofline, Work
from headrace_worker.gpu.timing import measured_roofline
from headrace_worker.gpu.tune import candidates, tuned
from headrace_worker.kernels.triton.tuning import DEFAULTS, UNTUNED, Tuning, default_cut

CPU = torch.device("cpu")
LIMITS = Roofline(copy_bytes_per_s=1e12, matrix_flop_per_s=1e14)
SMALL = BenchSizes(
    heads=Heads(2, 1, 16),
    decode=((1, 20),),
    prefill=((9, 20),),
    num_tokens=2,
    hidden_size=32,
    ffn_size=24,
    num_blocks=2,
    logits=(1, 300),
)
# The interpreter multiplies bit patterns of bfloat16 in tl.dot; nothing is compared here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def case_of(kernel: str, size: int, work: Work, launch, **goal: float) -> KernelCase:
    return KernelCase(f"{kernel} {size}", kernel, size, work, lambda _: launch, **goal)


def test_every_case_runs() -> None:
    """Each prepares its inputs and launches; every tuned kernel is timed by at least one."""
    cases = [*kernel_cases(SMALL)]
    for case in cases:
        ran: list[object] = []
        timed(case, lambda run, ran=ran: ran.append(run()) or 1.0, LIMITS, UNTUNED, CPU)
        assert len(ran) == 1
    assert {case.kernel for case in cases} == {*DEFAULTS, ""}


def test_the_large_sizes_are_those_of_the_goals() -> None:
    """Each case has a goal, and the shapes are a large server's."""
    cases = {case.name: case for case in kernel_cases(BenchSizes())}
    assert cases["decode attention 64 x 4096"].least_ratio == 0.8
    assert cases["prefill attention 8192 of 8192"].least_ratio == 0.55
    assert cases["gate 8192 x 14336"].least_ratio == 0.85
    assert cases["sampling 64 x 128256, greedy"].max_passes == 4
    assert all(case.least_ratio or case.max_passes for case in cases.values())


@pytest.mark.parametrize(("duration_s", "is_reached"), [(1.2, True), (1.3, False)])
def test_a_share_below_its_goal_is_missed(duration_s: float, *, is_reached: bool) -> None:
    """One second at best, and a goal of 80 %."""
    case = case_of("gated", 8, Work(1e12), lambda _: None, least_ratio=0.8)
    time = timed(case, lambda _: duration_s, LIMITS, UNTUNED, CPU)
    assert time.ratio == pytest.approx(1 / duration_s)
    assert (time.floor_s, time.goal, time.is_reached) == (1.0, ">= 80%", is_reached)


@pytest.mark.parametrize(("duration_s", "is_reached"), [(3.9, True), (4.1, False)])
def test_sampling_is_told_in_passes(duration_s: float, *, is_reached: bool) -> None:
    """At most four, each as long as reading all logits once."""
    case = case_of("", 8, Work(1e12), lambda _: None, max_passes=4)
    time = timed(case, lambda _: duration_s, LIMITS, UNTUNED, CPU)
    assert (time.goal, time.is_reached) == ("<= 4 passes", is_reached)


def cut_in(kernels) -> dict[str, int]:
    return kernels.silu_mul.keywords["tuning"].cuts["gated"]["64"]


def test_the_fastest_cut_that_can_be_launched_wins() -> None:
    """One is the fastest but asks for too much of the device."""
    tried: list[dict[str, int]] = []

    def timer(run) -> float:
        cut = run()
        tried.append(cut)
        if cut["BLOCK"] == 4096:
            raise RuntimeError("out of resource: shared memory")
        return abs(cut["BLOCK"] - 2000) + cut["num_warps"]

    case = case_of("gated", 64, Work(1.0), lambda kernels: lambda: cut_in(kernels))
    cut, duration_s = best_cut(case, [*candidates("gated", 64)], timer, CPU)
    assert cut == {"BLOCK": 2048, "num_warps": 4}
    assert duration_s == 52
    assert len(tried) == 8
    assert best_cut(case, [{"BLOCK": 4096, "num_warps": 4}], timer, CPU)[0] is None


def test_a_default_is_kept_where_nothing_is_better() -> None:
    """It is tried first, and what is as fast does not replace it."""
    for kernel in DEFAULTS:
        tried = [*candidates(kernel, 128)]
        assert tried[0] == default_cut(kernel, 128)
        assert len(tried) == len({tuple(sorted(cut.items())) for cut in tried})
        # Every cut is one that a table may hold.
        Tuning({kernel: {str(idx): cut for idx, cut in enumerate(tried)}})
    case = case_of("gated", 64, Work(1.0), lambda kernels: lambda: cut_in(kernels))
    assert tuned([case, case], lambda run: run() and 1.0, CPU) == Tuning(
        {"gated": {"64": DEFAULTS["gated"]}}
    )


def report_of(**changes) -> Report:
    device = Device("GPU 1", "9.0", 141_000_000_000, 132, "2.13.0", "13.0", "3.7.1")
    values = {
        "taken_on": date(2026, 11, 30),
        "device": device,
        "limits": Roofline(4.3e12, 790e12),
        "kernels": [
            KernelTime("gate 8192 x 14336", 2e-4, 1.8e-4, 0.9, ">= 85%", is_reached=True),
            KernelTime("sampling, greedy", 3e-5, 1e-5, 1 / 3, "<= 4 passes", is_reached=True),
        ],
        "steps": [StepTime(1, 5e-3, 9e-3, 4.5e-3, 3.6e-3, 0.8)],
        "engine": EngineRates(12_345.6, 60_000.0, 0.75),
    }
    return Report(**{**values, **changes})


def test_the_report_names_the_device_and_every_figure(tmp_path: Path) -> None:
    """A table for people, JSON for programs."""
    paths = report.write(report_of(), tmp_path / "figures")
    values = json.loads(paths[0].read_text())
    assert values["device"]["name"] == "GPU 1"
    assert values["kernels"][0]["ratio"] == 0.9
    assert values["missed"] == []
    table = paths[1].read_text()
    assert table.startswith("# GPU 1\n2026-11-30, capability 9.0, 132 processors, 141 GB")
    assert "copy 4.30 TB/s, bfloat16 products 790 TFLOP/s" in table
    assert "| gate 8192 x 14336 | 200 us | 180 us | 90% | >= 85% | yes |" in table
    assert "| sampling, greedy | 30 us | 10 us | 3.0 passes | <= 4 passes | yes |" in table
    assert "| 1 | 4500 us | 3600 us | 80% | >= 75% | yes | 5000 us | 9000 us |" in table
    assert "12346 output tokens/s (60000 with prompts), first token after 0.75 s" in table


def test_what_misses_its_goal_is_said() -> None:
    """Kernels and steps alike; the table shows it."""
    slow = KernelTime("gate", 4e-4, 1.8e-4, 0.45, ">= 85%", is_reached=False)
    step = replace(report_of().steps[0], batch=64, ratio=0.7)
    missed = report_of(kernels=[slow], steps=[step])
    assert missed.missed == ["gate", "decode step of 64"]
    assert report.markdown(missed).count("| NO |") == 2


def test_limits_are_told_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy counts what it reads and writes; a product two operations a pair."""
    monkeypatch.setattr("headrace_worker.gpu.timing._copy_s", lambda _: 1e-3)
    monkeypatch.setattr("headrace_worker.gpu.timing._product_s", lambda _: 2e-3)
    limits = measured_roofline(lambda _: 0.0)
    assert limits.copy_bytes_per_s == pytest.approx(2 * 2**31 / 1e-3)
    assert limits.matrix_flop_per_s == pytest.approx(2 * 8192**3 / 2e-3)


@without_gpu
@pytest.mark.parametrize("what", ["check", "bench"])
def test_without_a_gpu_both_refuse_and_say_what_is_needed(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, and the exit code is not that of a failed check."""
    assert main([what, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "sees no CUDA device" in said
    assert "one NVIDIA GPU of compute capability 8.0 or newer" in said
    assert not (tmp_path / "out").exists()


@without_gpu
def test_without_triton_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is optional: it comes with builds of torch for GPUs."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="triton is not installed"):
        require()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(1800)
def test_all_checks_hold_on_this_gpu() -> None:
    """In a process of its own, since this one has the interpreter."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "headrace_worker.gpu", "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
