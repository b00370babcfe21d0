"""What a prefill worker does to running streams and to first tokens, beside two plain workers.

``python bench/pairs.py [--streams 4] [--prompts 6]`` starts two fleets of two workers in turn:
both plain, then one that decodes and one that only computes prompts, where every prompt is moved.
On each it runs a few streams and sends long prompts meanwhile, and prints what was felt: gaps
between tokens of the streams, time to first token of the prompts, and how many of them were moved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from headrace_testing.api import metric, stream, unique
from headrace_testing.processes import ApiKey, Fleet, running_fleet

_POLICY = """
version = 1
[pairs]
setup_s = 0.0
transfer_bytes_per_s = 1e15
stall_weight = 100.0
"""
_LONG = "The miller counts sacks of rye, oats, barley, wheat and spelt before the frost. " * 30


@dataclass
class Felt:
    """What callers saw."""

    gaps_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    num_moved: float = 0.0


def main() -> int:
    """Run both fleets and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = _run(Path(folder) / "plain", {}, args.streams, args.prompts)
        policy = Path(folder) / "policy.toml"
        policy.write_text(_POLICY)
        environment = {
            "HEADRACE_LAUNCHER_PREFILL_WORKERS": "1",
            "HEADRACE_ROUTER_POLICY_FILE": str(policy),
        }
        paired = _run(Path(folder) / "paired", environment, args.streams, args.prompts)
    sys.stdout.write(f"{'':34}{'2 plain':>10}{'pair':>10}{'ratio':>8}\n")
    for name, one, other in (
        ("gap between tokens, p50, ms", _at(plain.gaps_s, 0.5), _at(paired.gaps_s, 0.5)),
        ("gap between tokens, p99, ms", _at(plain.gaps_s, 0.99), _at(paired.gaps_s, 0.99)),
        ("first token of a prompt, p50, ms", _at(plain.firsts_s, 0.5), _at(paired.firsts_s, 0.5)),
        ("first token of a prompt, max, ms", max(plain.firsts_s), max(paired.firsts_s)),
    ):
        ratio = other / one
        sys.stdout.write(f"{name:34}{one * 1e3:10.1f}{other * 1e3:10.1f}{ratio:8.2f}\n")
    sys.stdout.write(f"{'prompts computed elsewhere':34}{'':10}{paired.num_moved:10.0f}\n")
    return 0


def _run(state: Path, environment: dict[str, str], num_streams: int, num_prompts: int) -> Felt:
    felt = Felt()
    with running_fleet(state, num_workers=2, environment=environment) as fleet:
        key = fleet.create_key("bench")
        with ThreadPoolExecutor(num_streams) as pool:
            running = [pool.submit(_follow, fleet, key, felt) for _ in range(num_streams)]
            time.sleep(1.0)
            for _ in range(num_prompts):
                felt.firsts_s.append(_first(fleet, key))
            for one in running:
                one.result()
        if environment:
            address = fleet.worker("worker-1")["metrics_address"]
            felt.num_moved = metric(address, 'headrace_worker_kv_transfers_total{outcome="ok"}')
    return felt


def _follow(fleet: Fleet, key: ApiKey, felt: Felt) -> None:
    """Read a long stream and note the time between its events."""
    last_s = None
    for _ in _pieces(fleet, key, unique("Count up from one, slowly."), 400):
        now_s = time.perf_counter()
        if last_s is not None:
            felt.gaps_s.append(now_s - last_s)
        last_s = now_s


def _first(fleet: Fleet, key: ApiKey) -> float:
    started_s = time.perf_counter()
    took_s = 0.0
    for _ in _pieces(fleet, key, unique(_LONG), 2):
        took_s = took_s or time.perf_counter() - started_s
    return took_s


def _pieces(fleet: Fleet, key: ApiKey, prompt: str, max_tokens: int) -> Iterator[int]:
    """Yield once for each piece of text."""
    num_before = 0
    for answer in stream(fleet, key, prompt, max_tokens=max_tokens):
        if len(answer.pieces) > num_before:
            num_before = len(answer.pieces)
            yield num_before


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    sys.exit(main())
