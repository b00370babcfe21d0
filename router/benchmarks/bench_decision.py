"""One decision with a full index: 1,000 blocks, 32 replicas, 1 M blocks, in one run.

``python router/benchmarks/bench_decision.py [--replicas 32] [--blocks 1000000]`` prints what a
whole decision takes (gather, look up, filter, choose by `hold`, render the explanation) beside its
parts from the same run: reading the hashes out of the message, the lookup, and the same decision
without a prompt. The last row is what the service does in all: the decision with its booking, the
rendering and the end, which gives the load back. Before each decision some replica reports. Prompts
share beginnings of many lengths with what replicas hold; a tenth of them are under way on some
replica. Times are of the process's own CPU clock, so that other programs count little, and by the
wall.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from headrace_common.kv_index import TIERS, ReplicaKey, chain_ints
from headrace_contracts.worker.v1.worker_pb2 import (
    WORKER_STATE_READY,
    DescribeResponse,
    LoadReport,
    ModelCard,
)
from headrace_router.assumed import AssumedBlocks
from headrace_router.candidate import Query
from headrace_router.decisions import to_message
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.desk import PickDesk
from headrace_router.in_flight import InFlightBlocks
from headrace_router.known_prefixes import KnownPrefixes
from headrace_router.load_guard import LoadBook
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import PrefixMirror
from headrace_router.pick import Choice, Pipeline
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policy_file import load_policy_file
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable
from headrace_testing.clock import FakeClock

_PROMPT_BLOCKS = 1000
_ROUNDS = 3000


class Router:
    """The parts of a router that decide.

    Args:
        num_replicas: ready replicas, each with some load.
        num_blocks: blocks in the mirror.
    """

    def __init__(self, num_replicas: int, num_blocks: int) -> None:
        self.clock, self.random = FakeClock(), Random(1)  # noqa: S311 - repeatable
        self.table, self.mirror = ReplicaTable(), PrefixMirror()
        self.loads = LoadBook(InFlightBlocks())
        self.predictor = PrefillPredictor(1000.0)
        assumed = AssumedBlocks(120, 1 << 30, self.clock, self.mirror.replicas().__contains__)
        weights = dict(zip(TIERS, (1.0, 0.75, 0.25), strict=True))
        self.prefixes = KnownPrefixes(self.mirror, assumed, weights)
        self.predictor_of_decode = DecodePredictor()
        self.pipeline = Pipeline(
            self.table, self.prefixes, self.loads, self.predictor, self.predictor_of_decode
        )
        file = load_policy_file(None)
        file = file.model_copy(
            update={"hold": file.hold.model_copy(update={"slack_s": 1e9, "gather_s": 0.0})}
        )
        self.desk = PickDesk(
            self.pipeline,
            self.loads,
            self.predictor,
            self.predictor_of_decode,
            file,
            self.clock,
            self.random,
            RouterMetrics(CollectorRegistry()),
        )
        self.policy = HoldPolicy(HoldParameters(slack_s=1e9), self.random)
        self.keys = [ReplicaKey(f"worker-{number}", 1) for number in range(num_replicas)]
        for key in self.keys:
            described = DescribeResponse(
                replica=key.to_ref(), state=WORKER_STATE_READY, models=[ModelCard(model="m")]
            )
            self.table.describe(key.worker_id, described)
        self.report()
        self.prompts = self._fill(num_blocks)
        self.prefixes.describe(self.table.all())

    def report(self) -> None:
        """Let every replica report; the clock stands still, so that none grows stale."""
        for key in self.keys:
            self._report(key)

    def _report(self, key: ReplicaKey) -> None:
        report = LoadReport(
            replica=key.to_ref(),
            state=WORKER_STATE_READY,
            queued_prefill_tokens=self.random.randrange(4000),
            prefill_tokens_per_s=self.random.uniform(4000, 6000),
            decode_step_s=self.random.uniform(0.02, 0.03),
            decode_step_streams=self.random.randrange(1, 16),
        )
        self.loads.note_report(key, self.clock.now_s())
        self.predictor.observe_report(key, report)
        self.predictor_of_decode.observe(key, report)
        self.table.report(key.worker_id, report, self.clock.now_s())

    def decide(self, block_hashes: bytes) -> None:
        """Decide as the service does, from the message to the explanation."""
        query = _query(block_hashes)
        view = self.pipeline.view("m", self.clock.now_s())
        choice = self.pipeline.choose(query, self.policy, view)
        if choice is not None:
            to_message(query, choice, queue_s=0.0, index_staleness_s=0.0).SerializeToString()

    def serve(self, block_hashes: bytes) -> None:
        """Pick, book, explain and end as the service does."""
        query = _query(block_hashes)
        chosen: list[Choice] = []
        ticket = self.desk.submit(query, None, lambda one: chosen.append(one))  # type: ignore[arg-type]  # never an error here
        to_message(query, chosen[0], queue_s=0.0, index_staleness_s=0.0).SerializeToString()
        ticket.close()

    def report_one(self) -> None:
        """Let some replica report something new."""
        self._report(self.random.choice(self.keys))

    def _fill(self, num_blocks: int) -> list[bytes]:
        """Hold chains of 1,000 blocks, each to several depths; return prompts that begin so."""
        known = []
        for key in self.keys:
            known.append(self.mirror.begin("m"))
            self.mirror.commit(key, known[-1])
        prompts = []
        while self.mirror.num_entries() < num_blocks:
            prompt = self.random.randbytes(16 * _PROMPT_BLOCKS)
            chain = chain_ints(prompt)
            for holder in self.random.sample(known, min(4, len(known))):
                self.mirror.add(holder, TIERS[0], chain[: self.random.randrange(1, 1001)])
            prompts.append(prompt)
        for prompt in prompts[:: max(1, len(prompts) // 100)]:
            self.loads.book(
                self.random.choice(self.keys),
                chain_ints(prompt),
                uncached_tokens=100,
                prompt_tokens=16_000,
                now_s=self.clock.now_s(),
            )
        return prompts


def _query(block_hashes: bytes) -> Query:
    return Query(
        request_id="r",
        model="m",
        chain=chain_ints(block_hashes),
        prompt_tokens=len(block_hashes) + 8,
    )


@dataclass(frozen=True, slots=True)
class Times:
    """What one kind of act took. Microseconds."""

    cpu_p50: float
    cpu_p99: float
    wall_p50: float
    wall_p99: float


def main() -> int:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--dynamo-python", type=Path, help="a Python that has ai-dynamo-runtime")
    args = parser.parse_args()
    theirs = _reference(args) if args.dynamo_python else {}
    router = Router(args.replicas, args.blocks)
    sys.stdout.write(f"{args.blocks} blocks, {args.replicas} replicas, {_PROMPT_BLOCKS} a prompt\n")
    whole = _measure("whole decision", router, router.decide)
    _measure("reading the hashes", router, chain_ints, whole)
    _measure("lookup alone", router, lambda one: router.prefixes.depths(chain_ints(one)), whole)
    _measure("decision, no prompt", router, lambda _one: router.decide(b""), whole)
    served = _measure("pick, explain and end", router, router.serve, whole)
    for name, ours in (("select", whole), ("serve", served)):
        if theirs:
            _beside(name, ours, theirs)
    return 0


def _reference(args: argparse.Namespace) -> dict[str, float]:
    script = Path(__file__).with_name("dynamo_selection.py")
    command = [str(args.dynamo_python), str(script), str(args.replicas), str(args.blocks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _beside(name: str, ours: Times, theirs: dict[str, float]) -> None:
    for share, mine in (("p50", ours.wall_p50), ("p99", ours.wall_p99)):
        other = theirs[f"{name}_{share}_us"]
        text = f"{name} {share:4} wall {mine:10.1f} us  dynamo {other:10.1f} us"
        sys.stdout.write(f"{text}  ratio {mine / other:5.2f}\n")


def _measure(
    name: str,
    router: Router,
    act: Callable[[bytes], object],
    whole: Times | None = None,
) -> Times:
    """Print one line; return what it took."""
    walls, cpus = [], []
    for _ in range(_ROUNDS):
        prompt = random.choice(router.prompts)  # noqa: S311 - a sample
        router.report_one()
        started, cpu_started = time.perf_counter_ns(), time.thread_time_ns()
        act(prompt)
        cpus.append((time.thread_time_ns() - cpu_started) / 1e3)
        walls.append((time.perf_counter_ns() - started) / 1e3)
    walls.sort()
    cpus.sort()
    middle, most = _ROUNDS // 2, _ROUNDS * 99 // 100
    took = Times(cpus[middle], cpus[most], walls[middle], walls[most])
    text = f"{name:20} cpu p50 {took.cpu_p50:8.1f} us p99 {took.cpu_p99:8.1f} us"
    text += f"  wall p50 {took.wall_p50:8.1f} us p99 {took.wall_p99:8.1f} us"
    if whole is None:
        text += f"  goal p99 < 1000 us: {'met' if took.wall_p99 < 1000 else 'MISSED'}"
    else:
        text += f"  {took.cpu_p99 / whole.cpu_p99:5.2f} of the whole"
    sys.stdout.write(text + "\n")
    return took


if __name__ == "__main__":
    sys.exit(main())
