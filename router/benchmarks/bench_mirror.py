"""The router's prefix mirror beside Dynamo's Rust tree, in one run.

``python router/benchmarks/bench_mirror.py --dynamo-python D/bin/python [--blocks 1000000]`` prints
times, rates, memory and ratios; without ``--dynamo-python`` ours alone. How to make D:
`dynamo_reference.py`. Both hold the same chains of 100 blocks, each on one of the workers, and look
up whole prompts that are held; ours includes decoding the messages of the Redis stream.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace_common.kv_index import TIERS, ReplicaKey, short_ints
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_router.mirror import BYTES_PER_ENTRY, PrefixMirror

_CHAIN_BLOCKS = 100
_CHANGE_BLOCKS = 500
_Check = Callable[[float, float], bool]
_GOALS: dict[str, tuple[str, _Check]] = {
    "lookup_100_p50_us": ("at most 3 x theirs", lambda ours, theirs: ours <= 3 * theirs),
    "apply_blocks_per_s": (">= 500,000", lambda ours, _: ours >= 500_000),
    "full_add_500_max_us": ("<= 10,000", lambda ours, _: ours <= 10_000),
    "bytes_per_block": ("<= 140", lambda ours, _: ours <= 140),
}


def main() -> int:
    """Measure ours, then theirs, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lookups", type=int, default=2000)
    parser.add_argument("--dynamo-python", type=Path, help="a Python that has ai-dynamo-runtime")
    args = parser.parse_args()
    theirs = {}
    if args.dynamo_python:
        script = Path(__file__).with_name("dynamo_reference.py")
        numbers = [str(one) for one in (args.blocks, args.workers, args.lookups)]
        command = [str(args.dynamo_python), str(script), *numbers]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ours
        theirs = json.loads(done.stdout)
    ours = _measure(args.blocks, args.workers, args.lookups)
    sys.stdout.write(f"{args.blocks} blocks, {args.workers} workers\n")
    for name, value in ours.items():
        sys.stdout.write(_line(name, value, theirs.get(name)) + "\n")
    return 0


def _measure(num_blocks: int, num_workers: int, num_lookups: int) -> dict[str, float]:
    rng = random.Random(1)  # noqa: S311 - the same data on both sides
    packed = [rng.randbytes(8 * _CHAIN_BLOCKS) for _ in range(num_blocks // _CHAIN_BLOCKS)]
    keys = [ReplicaKey(f"worker-{number}", 1) for number in range(num_workers)]
    messages = [
        IndexDelta(
            replica=keys[idx % num_workers].to_ref(),
            seq=1 + idx // num_workers,
            model="m",
            tier=TIERS[0],
            added=chain,
        ).SerializeToString()
        for idx, chain in enumerate(packed)
    ]
    mirror = PrefixMirror()
    gc.collect()
    before = _rss_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    for message in messages:
        mirror.apply(IndexDelta.FromString(message))
    apply_s, apply_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    gc.collect()
    result = {
        "apply_blocks_per_s": num_blocks / apply_s,
        "apply_blocks_per_cpu_s": num_blocks / apply_cpu_s,
        "bytes_per_block": (_rss_bytes() - before) / num_blocks,
    }
    asked = [short_ints(one) for one in rng.sample(packed, min(num_lookups, len(packed)))]
    for length in (10, _CHAIN_BLOCKS):
        prompts = [chain[:length] for chain in asked]
        result |= _lookups(length, prompts, mirror.depths)
    # Long prompts are runs of chains on one worker: as a conversation's turns.
    long = tuple(
        block for one in packed[: 10 * num_workers : num_workers] for block in short_ints(one)
    )
    result |= _lookups(len(long), [long] * num_lookups, mirror.depths)
    started = time.perf_counter()
    mirror.drop(keys[0])
    result["death_of_a_worker_us"] = (time.perf_counter() - started) * 1e6
    return result | _at_the_bound(num_blocks, rng)


def _at_the_bound(num_blocks: int, rng: random.Random) -> dict[str, float]:
    """Time single changes of a mirror that is full: CPU, so that a busy machine tells the same."""
    mirror = PrefixMirror(num_blocks * BYTES_PER_ENTRY)
    known, times = mirror.begin("m"), []
    while mirror.num_evicted < 2 * num_blocks:
        blocks = short_ints(rng.randbytes(8 * _CHANGE_BLOCKS))
        started = time.thread_time()
        mirror.add(known, TIERS[0], blocks)
        if mirror.num_evicted:
            times.append(time.thread_time() - started)
    times.sort()
    return {
        "full_add_500_p50_us": times[len(times) // 2] * 1e6,
        "full_add_500_p99_us": times[len(times) * 99 // 100] * 1e6,
        "full_add_500_max_us": times[-1] * 1e6,
    }


def _lookups(
    length: int, prompts: list[tuple[int, ...]], lookup: Callable[[tuple[int, ...]], object]
) -> dict[str, float]:
    times = []
    for prompt in prompts:
        started = time.perf_counter()
        lookup(prompt)
        times.append(time.perf_counter() - started)
    times.sort()
    return {
        f"lookup_{length}_p50_us": times[len(times) // 2] * 1e6,
        f"lookup_{length}_p99_us": times[len(times) * 99 // 100] * 1e6,
    }


def _line(name: str, ours: float, theirs: float | None) -> str:
    text = f"{name:26} {ours:14,.1f}"
    if theirs is not None:
        text += f"  dynamo {theirs:14,.1f}  ratio {ours / theirs:6.2f}"
    if name in _GOALS:
        goal, is_met = _GOALS[name]
        if theirs is not None or "theirs" not in goal:
            text += f"  goal {goal}: {'met' if is_met(ours, theirs or 0.0) else 'MISSED'}"
    return text


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
