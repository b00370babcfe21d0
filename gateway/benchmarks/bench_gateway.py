"""Our gateway and its peers in front of instant upstreams, in one run, one core each.

    python gateway/benchmarks/bench_gateway.py --harness DIR [--peers-dir DIR] [--only ours,smg]

Prints a table, and the ratios of our two ends (everything on; keys alone) to each peer. README.md
says what is measured and how. Installs the peers into ``--peers-dir`` if they are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import (
    MOCK_PORT,
    Harness,
    HarnessMissingError,
    Target,
    cpu_s,
    ended,
    open_request,
    pids_of,
    rss_mb,
    stats,
    wait_port,
)
from peers import PEERS, Peer, install, launch
from report import print_report

from headrace_testing.servers import kafka
from headrace_testing.waiting import free_port

# What is left out in each of our rows.
OURS = {
    "ours": "",
    "ours-no-guard": "guard",
    "ours-no-admission": "admission",
    "ours-no-outbox": "outbox",
    "ours-keys-only": "guard,admission,outbox",
}
_HERE = Path(__file__).parent
_PEERS_DIR = Path.home() / ".cache" / "headrace" / "bench-gateway"
Figures = dict[str, Any]  # Any: numbers, by measurement


def main() -> int:
    """Measure each in turn."""
    args = _arguments()
    # So that what was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = args.only.split(",") if args.only else [*OURS, *(peer.name for peer in PEERS)]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            harness = Harness(args.harness, Path(scratch), args.driver_cpu)
            mock = harness.start_mock()
        except HarnessMissingError as error:
            print(f"skipped: {error}. --harness names its folder.")
            return 0
        with ended(mock):
            results = _measure_all(harness, args, names, Path(scratch))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print_report(results, sys.stdout)
    return 0


def _measure_all(
    harness: Harness, args: argparse.Namespace, names: list[str], scratch: Path
) -> dict[str, Figures]:
    results: dict[str, Figures] = {}
    with contextlib.ExitStack() as stack:
        if any(name in OURS for name in names):
            broker = kafka(scratch)
            broker.start()
            stack.callback(broker.kill)
            os.sched_setaffinity(broker.pid, {args.driver_cpu})
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            if name in OURS:
                running = _ours(harness, args, OURS[name], scratch, broker.port)
            else:
                peer = next(it for it in PEERS if it.name == name)
                reason = install(peer, args.peers_dir)
                if reason:
                    results[name] = {"failed": reason}
                    continue
                running = _peer(args, peer)
            try:
                with running as (port, target):
                    results[name] = measure(harness, target, args.seconds, pids_of(port))
                    # Not lost if the run is cut.
                    print_report({name: results[name]}, sys.stderr)
            except (TimeoutError, OSError, subprocess.SubprocessError) as error:
                results[name] = {"failed": str(error)[:200]}
    return results


@contextlib.contextmanager
def _ours(
    harness: Harness, args: argparse.Namespace, without: str, scratch: Path, kafka_port: int
) -> Iterator[tuple[int, Target]]:
    command = [sys.executable, str(_HERE / "instant_fleet.py")]
    command += ["--fail-open"] if "guard" in without else []
    fleet = subprocess.Popen(harness.pinned(command), stdout=subprocess.PIPE, text=True)
    with ended(fleet):
        assert fleet.stdout is not None
        where = json.loads(fleet.stdout.readline())
        (scratch / "fleet.json").write_text(json.dumps(where))
        port = free_port()
        command = [args.python, str(_HERE / "gateway_process.py"), "--port", str(port)]
        command += ["--fleet", str(scratch / "fleet.json"), "--without", without]
        command += ["--kafka", f"127.0.0.1:{kafka_port}"]
        gateway = subprocess.Popen(harness.pinned(command, args.gateway_cpu))
        with ended(gateway):
            target = Target("ours", port, where["api_key"], where["stats_port"])
            _wait_until_served(harness, target)
            yield port, target


@contextlib.contextmanager
def _peer(args: argparse.Namespace, peer: Peer) -> Iterator[tuple[int, Target]]:
    port = free_port()
    process = launch(peer, args.harness, args.peers_dir, port, args.gateway_cpu)
    with ended(process):
        wait_port(port, 90)
        yield port, Target(peer.name, port, "sk-bench-key", MOCK_PORT, peer.headers)


def _wait_until_served(harness: Harness, target: Target) -> None:
    wait_port(target.port, 30)
    end_s = time.monotonic() + 20
    while harness.load(target.port, 1, 0.1, "whole", target.header_args)["bad_status"]:
        if time.monotonic() > end_s:
            raise TimeoutError("it serves no request")
        time.sleep(0.2)


def measure(harness: Harness, target: Target, seconds: float, pids: set[int]) -> Figures:
    """Take every figure of one gateway."""

    def load(conc: int, body: str, for_s: float) -> Figures:
        before_s = cpu_s(pids)
        result = harness.load(target.port, conc, for_s, body, target.header_args)
        result["cpu_s"] = cpu_s(pids) - before_s
        return result

    def direct(conc: int, body: str, for_s: float) -> Figures:
        return harness.load(MOCK_PORT, conc, for_s, body, [])

    load(16, "whole", seconds)
    figures: Figures = {"rss_mb_start": rss_mb(pids)}
    for conc in (1, 16, 64):
        figures[f"whole{conc}"] = load(conc, "whole", seconds)
        figures[f"whole{conc}_direct"] = direct(conc, "whole", min(seconds, 0.7))
    figures["burst16"] = load(16, "burst", seconds)
    for conc in (1, 64):
        figures[f"paced{conc}"] = load(conc, "paced", max(seconds, 1.5))
        figures[f"paced{conc}_direct"] = direct(conc, "paced", 0.9)
    figures["gone_mid"] = _departures(harness, target, "paced", has_begun=True)
    figures["gone_before"] = _departures(harness, target, "slow", has_begun=False)
    figures["rss_mb"] = rss_mb(pids)
    figures["load"] = os.getloadavg()[0]
    return figures


def _departures(harness: Harness, target: Target, body: str, *, has_begun: bool) -> int:
    """Let eight clients leave; how many the upstream heard of within three seconds."""
    before = stats(target.stats_port)["aborted"]
    connections = [open_request(target, harness.body(body)) for _ in range(8)]
    time.sleep(0.3)
    for connection in connections:
        if has_begun:
            with contextlib.suppress(OSError):
                connection.recv(4096)
        connection.close()
    end_s = time.monotonic() + 3
    while (heard := stats(target.stats_port)["aborted"] - before) < 8 and time.monotonic() < end_s:
        time.sleep(0.02)
    return heard


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harness", type=Path, required=True, help="folder of mock.c, loadgen.c")
    parser.add_argument("--peers-dir", type=Path, default=_PEERS_DIR)
    parser.add_argument("--only", default="", help="rows, comma-separated")
    parser.add_argument("--python", default=sys.executable, help="runs our gateway")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each step")
    parser.add_argument("--driver-cpu", type=int, default=0)
    parser.add_argument("--gateway-cpu", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
