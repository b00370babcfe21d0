"""Dynamo's Rust radix tree, called from Python: the reference of `bench_mirror.py`.

Runs in an environment of its own that holds `ai-dynamo-runtime` and nothing of ours:
``python -m venv D && D/bin/pip install ai-dynamo-runtime``. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import time

from dynamo._core import RadixTree  # type: ignore[import-not-found]  # not in our environment

CHAIN_BLOCKS = 100


def main() -> None:
    """Fill a tree as the mirror is filled, then look prompts up."""
    num_blocks, num_workers, num_lookups = (int(word) for word in sys.argv[1:4])
    rng = random.Random(1)  # noqa: S311 - the same data on both sides
    chains = [
        [rng.getrandbits(63) for _ in range(CHAIN_BLOCKS)]
        for _ in range(num_blocks // CHAIN_BLOCKS)
    ]
    events = [
        (idx % num_workers, _event(idx, chain)) for idx, chain in enumerate(chains)
    ]  # built before the clock starts
    tree = RadixTree()
    started = time.perf_counter()
    for worker, event in events:
        tree.apply_event(worker, event)
    # Events are applied on a thread of the tree's own: an answer says that all are in.
    while not tree.find_matches(chains[-1]).scores:
        time.sleep(0.001)
    apply_s = time.perf_counter() - started
    result = {"apply_blocks_per_s": num_blocks / apply_s}
    asked = rng.sample(chains, min(num_lookups, len(chains)))
    for length in (10, CHAIN_BLOCKS):
        times = []
        for chain in asked:
            started = time.perf_counter()
            tree.find_matches(chain[:length])
            times.append(time.perf_counter() - started)
        times.sort()
        result[f"lookup_{length}_p50_us"] = times[len(times) // 2] * 1e6
        result[f"lookup_{length}_p99_us"] = times[len(times) * 99 // 100] * 1e6
    sys.stdout.write(json.dumps(result) + "\n")


def _event(number: int, chain: list[int]) -> bytes:
    blocks = [{"block_hash": one, "tokens_hash": one} for one in chain]
    stored = {"parent_hash": None, "blocks": blocks}
    return json.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0}).encode()


if __name__ == "__main__":
    main()
