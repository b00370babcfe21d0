"""Figures of one GPU as JSON for programs and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from headrace_worker.gpu.device import Device
from headrace_worker.gpu.kernel_bench import KernelTime
from headrace_worker.gpu.model_bench import GOAL_RATIO, EngineRates, StepTime
from headrace_worker.gpu.roofline import Roofline

JSON_NAME, TABLE_NAME = "gpu-bench.json", "gpu-bench.md"


@dataclass(frozen=True)
class Report:
    """All figures of one run."""

    taken_on: date
    device: Device
    limits: Roofline
    kernels: Sequence[KernelTime]
    steps: Sequence[StepTime]
    engine: EngineRates

    @property
    def missed(self) -> list[str]:
        """What did not reach its goal."""
        kernels = [it.name for it in self.kernels if not it.is_reached]
        steps = [f"decode step of {it.batch}" for it in self.steps if it.ratio < GOAL_RATIO]
        return kernels + steps


def write(report: Report, folder: Path) -> list[Path]:
    """Write both files; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    values = asdict(report) | {"taken_on": report.taken_on.isoformat(), "missed": report.missed}
    paths = [folder / JSON_NAME, folder / TABLE_NAME]
    paths[0].write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(report), encoding="utf-8")
    return paths


def markdown(report: Report) -> str:
    """Return the table."""
    device, limits = report.device, report.limits
    lines = [
        f"# {device.name}",
        f"{report.taken_on}, capability {device.capability}, {device.processors} processors, "
        f"{device.memory_bytes / 1e9:.0f} GB, torch {device.torch}, CUDA {device.cuda}, triton "
        f"{device.triton}. Measured limits: copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"bfloat16 products {limits.matrix_flop_per_s / 1e12:.0f} TFLOP/s.",
        "",
        *_table(
            ("kernel", "time", "floor", "share", "goal", "reached"),
            (
                (
                    it.name,
                    _us(it.duration_s),
                    _us(it.floor_s),
                    f"{1 / it.ratio:.1f} passes" if "passes" in it.goal else f"{it.ratio:.0%}",
                    it.goal,
                    _yes(it.is_reached),
                )
                for it in report.kernels
            ),
        ),
        "",
        "Decode step of a model shaped like Llama 3 8B, random bfloat16 weights:",
        "",
        *_table(
            ("batch", "model", "floor", "share", "goal", "reached", "with sampling", "eager"),
            (
                (
                    str(it.batch),
                    _us(it.model_s),
                    _us(it.floor_s),
                    f"{it.ratio:.0%}",
                    f">= {GOAL_RATIO:.0%}",
                    _yes(it.ratio >= GOAL_RATIO),
                    _us(it.recorded_s),
                    _us(it.eager_s),
                )
                for it in report.steps
            ),
        ),
        "",
        f"Whole engine, all requests at once: {report.engine.output_tokens_per_s:.0f} output "
        f"tokens/s ({report.engine.total_tokens_per_s:.0f} with prompts), first token after "
        f"{report.engine.first_token_s:.2f} s (median).",
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _us(duration_s: float) -> str:
    return f"{duration_s * 1e6:.0f} us"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"
