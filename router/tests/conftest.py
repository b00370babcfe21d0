"""What the router's tests share: a small fleet on a clock that moves only when told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_UNSPECIFIED,
    WORKER_STATE_READY,
    DescribeResponse,
    LoadReport,
    ModelCard,
    PoolRole,
    WorkerState,
)
from headrace_router.candidate import Query
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_router.mirror import PrefixMirror
from headrace_router.pick import Choice, Pipeline
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policies.policy import Policy
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable
from headrace_testing.clock import FakeClock

RATE = 1000.0


@dataclass
class Fleet:
    """Replicas a router can see, without any network."""

    clock: FakeClock
    table: ReplicaTable = field(default_factory=ReplicaTable)
    mirror: PrefixMirror = field(default_factory=PrefixMirror)
    loads: LoadBook = field(default_factory=lambda: LoadBook(InFlightBlocks()))
    predictor: PrefillPredictor = field(default_factory=lambda: PrefillPredictor(RATE))

    decode: DecodePredictor = field(default_factory=DecodePredictor)

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(self.table, self.mirror, self.loads, self.predictor, self.decode)
        self.policy: Policy = HoldPolicy(HoldParameters(), Random(1))

    def add(
        self,
        worker_id: str,
        incarnation: int = 1,
        model: str = "m",
        role: PoolRole.ValueType = POOL_ROLE_UNSPECIFIED,
        kv_bytes_per_token: int = 0,
    ) -> ReplicaKey:
        """Add a ready worker; its address is its name."""
        key = ReplicaKey(worker_id, incarnation)
        described = DescribeResponse(
            replica=key.to_ref(),
            state=WORKER_STATE_READY,
            models=[ModelCard(model=model, kv_bytes_per_token=kv_bytes_per_token)],
            role=role,
        )
        self.table.describe(worker_id, described)
        self.report(key)
        return key

    def report(
        self,
        key: ReplicaKey,
        state: WorkerState.ValueType = WORKER_STATE_READY,
        **numbers: float,
    ) -> bool:
        """Let a worker report."""
        report = LoadReport(replica=key.to_ref(), state=state, **numbers)  # type: ignore[arg-type]  # numbers fit
        self.loads.note_report(key, self.clock.now_s())
        self.decode.observe(key, report)
        self.predictor.observe_report(key, report)
        return self.table.report(key.worker_id, report, self.clock.now_s())

    def choose(self, query: Query | None = None) -> Choice | None:
        """Choose for a query."""
        query = query or _ask()
        return self.pipeline.choose(
            query, self.policy, self.pipeline.view(query.model, self.clock.now_s())
        )

    def pick(self, query: Query | None = None) -> tuple[str, LoadGuard]:
        """Choose and book."""
        query = query or _ask()
        choice = self.choose(query)
        assert choice is not None
        guard = self.loads.book(
            choice.chosen.key,
            query.chain,
            uncached_tokens=choice.chosen.uncached_tokens,
            prompt_tokens=query.prompt_tokens,
            now_s=self.clock.now_s(),
        )
        return choice.chosen.key.worker_id, guard


def _ask(prompt_tokens: int = 16, **fields: object) -> Query:
    """Make a query."""
    known: dict[str, object] = {"request_id": "r", "model": "m", "prompt_tokens": prompt_tokens}
    return Query(**(known | fields))  # type: ignore[arg-type]  # tests name real fields


@pytest.fixture
def fleet(clock: FakeClock) -> Fleet:
    return Fleet(clock)


@pytest.fixture(scope="session")
def make_fleet() -> type[Fleet]:
    return Fleet


@pytest.fixture(scope="session")
def ask() -> Callable[..., Query]:
    return _ask
