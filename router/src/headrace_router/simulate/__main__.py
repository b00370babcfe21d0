"""Command line of the simulator: `python -m headrace_router.simulate`, or `headrace simulate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from headrace_common.settings import SettingsError
from headrace_router.policy_file import PolicyName, load_policy_file
from headrace_router.simulate.cost_model import CostModel, FitError, fit, read_step_log
from headrace_router.simulate.results import plot, table
from headrace_router.simulate.scenario import COMPARED_POLICIES, Scenario
from headrace_router.simulate.simulation import Run, simulate
from headrace_router.simulate.svg import picture
from headrace_router.simulate.trace import TraceError, read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run simulations; return the exit code (2: the command line or a file is wrong)."""
    args = _parser().parse_args(arguments)
    try:
        requests = read_trace(args.trace, args.load, args.requests)
        scenario = _scenario(args)
        runs = []
        for policy in args.policies:
            run = simulate(requests, scenario, policy)
            runs.append(run)
            if not args.json:
                sys.stderr.write(f"{policy}: {run.result.run_s:.0f} s\n")
        if args.plot is not None:
            args.plot.write_text(_svg(args, scenario, runs), encoding="utf-8")
    except (TraceError, FitError, SettingsError, OSError) as error:
        sys.stderr.write(f"headrace simulate: {error}\n")
        return 2
    sys.stdout.write(_json(args, scenario, runs) if args.json else _text(runs))
    return 0


def _svg(args: argparse.Namespace, scenario: Scenario, runs: Sequence[Run]) -> str:
    title = (
        f"{args.trace.name}, {runs[0].result.num_requests} requests scored, load x{args.load:g}, "
        f"{scenario.num_workers} workers, {scenario.kv_tokens} KV tokens each"
    )
    return picture({run.result.policy: run.ttfts() for run in runs}, title)


def _json(args: argparse.Namespace, scenario: Scenario, runs: Sequence[Run]) -> str:
    told = {
        "trace": args.trace.name,
        "load": args.load,
        "workers": scenario.num_workers,
        "kv_tokens": scenario.kv_tokens,
        "routers": scenario.num_routers,
        "policies": [run.result.as_dict() for run in runs],
    }
    return json.dumps(told, indent=1) + "\n"


def _text(runs: Sequence[Run]) -> str:
    curves = {run.result.policy: run.ttfts() for run in runs}
    return f"{table([run.result for run in runs])}\n\n{plot(curves)}\n"


def _scenario(args: argparse.Namespace) -> Scenario:
    costs = fit(read_step_log(args.fit)) if args.fit else CostModel()
    return Scenario(
        num_workers=args.workers,
        kv_tokens=args.kv_tokens,
        costs=costs,
        chunk_tokens=args.chunk_tokens,
        num_routers=args.routers,
        share_bookings=args.sharing == "on",
        event_loss_ratio=args.lose_events,
        tell_goals=args.tell_goals,
        seed=args.seed,
        policy_file=load_policy_file(args.policy_file),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace simulate",
        description="Runs a trace through a simulated fleet, once per picking policy.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help=".jsonl or .csv, also as .zst")
    add("--load", type=_positive, default=1.0, metavar="X", help="x recorded speed (default 1)")
    add("--workers", type=_count, default=8, metavar="N", help="default 8")
    add("--kv-tokens", type=_count, default=410_000, metavar="T", help="per worker, default 410000")
    add("--policies", type=_policies, default=COMPARED_POLICIES, metavar="A,B,...")
    add("--json", action="store_true", help="for scripts")
    add("--plot", type=Path, metavar="FILE.svg", help="write the curves as a picture too")
    add("--requests", type=_count, metavar="N", help="only the first N of the trace")
    add("--routers", type=_count, default=1, metavar="N", help="default 1")
    add("--sharing", choices=("on", "off"), default="on", help="routers tell each other decisions")
    add("--lose-events", type=_share, default=0.0, metavar="R", help="share of index changes lost")
    add("--policy-file", type=Path, metavar="FILE", help="TOML with the policies' parameters")
    add("--fit", type=Path, metavar="FILE", help="a worker's log of steps to take the costs from")
    add("--chunk-tokens", type=_count, default=2048, metavar="T", help="per step, default 2048")
    add("--tell-goals", action="store_true", help="requests carry their goal to the router")
    add("--seed", type=int, default=1, metavar="S", help="default 1")
    return parser


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(get_args(PolicyName)))
    if unknown or not names:
        known = ", ".join(get_args(PolicyName))
        raise argparse.ArgumentTypeError(f"no such policy: {', '.join(unknown)}; there are {known}")
    return names


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be from 0 to below 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
