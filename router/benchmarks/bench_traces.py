"""All policies on all public traces; what more routers and lost events change; in one run.

``python router/benchmarks/bench_traces.py TRACES [--keep FOLDER] [--part table|routers|loss]`` runs
`headrace simulate` with the packaged policy file, 8 workers of 410,000 KV tokens, over each trace
in the folder TRACES, and prints the tables of docs/routing-simulation.md and whether the goals are
met. It takes some forty minutes of CPU time, which ``--jobs N`` shares out. ``--keep`` stores what
each simulation said and does not repeat it. Each trace runs at x1.3 of its recorded load, and where
that leaves workers idle also at a load that fills them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_router.simulate.scenario import COMPARED_POLICIES

_LOADS = {
    "mooncake_conversation": (1.3,),
    "mooncake_synthetic": (1.0, 1.3),
    "toolagent_standin": (1.3, 3.0),
    "azure2023_code": (1.3, 8.0),
    "azure2023_conv": (1.3, 8.0),
}
_OTHER_LOADS = (1.3,)
_GOAL_TRACE = "mooncake_conversation"
_FLEET = ("--workers", "8", "--kv-tokens", "410000")


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation."""

    trace: Path
    load: float
    policy: str = "hold"
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The trace's, without what its file is."""
        return self.trace.name.split(".")[0]


class Simulations:
    """Runs simulations, each once.

    Args:
        folder: where results are kept; None = nowhere.
        num_jobs: how many run at a time.
    """

    def __init__(self, folder: Path | None, num_jobs: int = 1) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(num_jobs)
        self._running: dict[Cell, Future[dict[str, Any]]] = {}

    def begin(self, cells: Iterable[Cell]) -> None:
        """Run them in this order, beside whoever asks for one."""
        for cell in cells:
            if cell not in self._running:
                self._running[cell] = self._pool.submit(self.run, cell)

    def result(self, cell: Cell) -> dict[str, Any]:
        """Return what a simulation found."""
        self.begin([cell])
        return self._running[cell].result()

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a simulation, unless it is known already."""
        load = f"{cell.load:g}"
        words = [cell.trace.name, load, cell.policy, *cell.options]
        kept = self._folder / ("_".join(words).replace("-", "") + ".json") if self._folder else None
        if kept is not None and kept.exists():
            text = kept.read_text()
        else:
            command = [sys.executable, "-m", "headrace_router.simulate", "--json", *_FLEET]
            command += ["--trace", str(cell.trace), "--load", load, "--policies", cell.policy]
            command += cell.options
            sys.stderr.write(f"{' '.join(words)}\n")
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
            text = done.stdout
            if kept is not None:
                kept.write_text(text)
        found: dict[str, Any] = json.loads(text)["policies"][0]
        return found


def main() -> int:
    """Run and print; 1 = some goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, help="a folder of traces")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", choices=("table", "routers", "loss"))
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    simulations = Simulations(args.keep, args.jobs)
    traces = sorted(
        one for one in args.traces.iterdir() if {".jsonl", ".csv"}.intersection(one.suffixes)
    )
    parts = {"table": _table, "routers": _routers, "loss": _loss}
    chosen = [args.part] if args.part else list(parts)
    missed = [fault for part in chosen for fault in parts[part](simulations, traces)]
    for fault in missed:
        sys.stdout.write(f"MISSED: {fault}\n")
    return 1 if missed else 0


def _table(simulations: Simulations, traces: list[Path]) -> list[str]:
    _row("trace", "load", "policy", "hit ratio", "TTFT mean", "TTFT p99", "inside the goal")
    _row(*["---"] * 7)
    missed = []
    simulations.begin(
        Cell(trace, load, policy)
        for trace in traces
        for load in _LOADS.get(Cell(trace, 1.0).name, _OTHER_LOADS)
        for policy in COMPARED_POLICIES
    )
    for trace in traces:
        name = Cell(trace, 1.0).name
        for load in _LOADS.get(name, _OTHER_LOADS):
            for policy in COMPARED_POLICIES:
                found = simulations.result(Cell(trace, load, policy))
                _row(name, f"x{load:g}", policy, *_figures(found))
                if policy == "hold" and (name, load) == (_GOAL_TRACE, 1.3):
                    missed += _faults(found)
        if name == _GOAL_TRACE:
            found = simulations.result(Cell(trace, 1.2))
            _row(name, "x1.2", "hold", *_figures(found))
            if found["slo_ratio"] < 0.95:
                missed.append("x1.2 at 95 % inside the goal")
    return missed


def _faults(found: dict[str, Any]) -> list[str]:
    goals = {
        "90 % inside the goal at x1.3": found["slo_ratio"] >= 0.9,
        "mean TTFT <= 2.6 s at x1.3": found["ttft_mean_s"] <= 2.6,
        "p99 TTFT <= 21 s at x1.3": found["ttft_p99_s"] <= 21,
    }
    return [goal for goal, is_met in goals.items() if not is_met]


def _routers(simulations: Simulations, traces: list[Path]) -> list[str]:
    sys.stdout.write("\nFour routers, `hold`:\n\n")
    return _compare(simulations, traces, ("--routers", "4"), "slo_ratio", 0.05)


def _loss(simulations: Simulations, traces: list[Path]) -> list[str]:
    sys.stdout.write("\n1 % of the index's changes lost, `hold`:\n\n")
    return _compare(simulations, traces, ("--lose-events", "0.01"), "hit_ratio", 0.01)


def _compare(
    simulations: Simulations,
    traces: list[Path],
    options: tuple[str, ...],
    figure: str,
    most: float,
) -> list[str]:
    """Print each trace's heaviest load with and without *options*; *figure* falls by *most*."""
    _row("trace", "load", "", "hit ratio", "TTFT mean", "TTFT p99", "inside the goal")
    _row(*["---"] * 7)
    missed = []
    simulations.begin(
        Cell(trace, _LOADS.get(Cell(trace, 1.0).name, _OTHER_LOADS)[-1], options=one)
        for trace in traces
        for one in ((), options)
    )
    for trace in traces:
        name = Cell(trace, 1.0).name
        load = _LOADS.get(name, _OTHER_LOADS)[-1]
        before = simulations.result(Cell(trace, load))
        after = simulations.result(Cell(trace, load, options=options))
        _row(name, f"x{load:g}", "without", *_figures(before))
        _row(name, f"x{load:g}", " ".join(options), *_figures(after))
        if before[figure] - after[figure] > most:
            missed.append(f"{' '.join(options)} on {name}: {figure} falls by more than {most}")
    return missed


def _figures(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['hit_ratio']:.1%}",
        f"{found['ttft_mean_s']:.2f} s",
        f"{found['ttft_p99_s']:.1f} s",
        f"{found['slo_ratio']:.1%}",
    ]


def _row(*words: str) -> None:
    sys.stdout.write(f"| {' | '.join(words)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
