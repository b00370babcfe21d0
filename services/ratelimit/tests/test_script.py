"""The scripts against the limiter in memory, on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from headrace_ratelimit.limiter import Amounts, Charge, Decision, Kind, Measure, MemoryLimiter
from headrace_ratelimit.plans import Place, Plan
from headrace_ratelimit.store import (
    Command,
    Script,
    admit_command,
    decision_of,
    renew_command,
    settle_command,
    source_of,
)

pytestmark = pytest.mark.redis

# 2026-11-30 23:59:30 UTC: day and month end soon.
START_US = 1_796_083_170_000_000
TENANTS = itertools.count()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def run(server: redis.Redis, command: Command) -> object:
    return server.eval(source_of(command.script), 1, command.key, *command.args)


def plan(tenant: str, lease: str, lease_us: int, charges: list[Charge]) -> Plan:
    return Plan(tenant, lease, lease_us, False, charges, [Place(1, 1)] * len(charges))


LIMITS = {
    Kind.RATE: st.sampled_from([1, 2, 7, 10, 60, 1_000, 333_333, 10**12]),
    Kind.DAY_COUNT: st.integers(1, 8),
    Kind.SLOTS: st.integers(1, 3),
    Kind.DAY_BUDGET: st.sampled_from([0, 1000, 9 * 10**15]),
    Kind.MONTH_BUDGET: st.sampled_from([0, 1500, 9 * 10**15]),
    Kind.TOTAL_BUDGET: st.sampled_from([0, 3000, 9 * 10**15]),
}
MEASURES = {
    Kind.RATE: [Measure.REQUESTS, Measure.INPUT_TOKENS, Measure.OUTPUT_TOKENS, Measure.TOKENS],
    Kind.DAY_COUNT: [Measure.REQUESTS],
    Kind.SLOTS: [Measure.LEASES],
    Kind.DAY_BUDGET: [Measure.COST],
    Kind.MONTH_BUDGET: [Measure.COST],
    Kind.TOTAL_BUDGET: [Measure.COST],
}
AMOUNTS = st.builds(
    Amounts,
    requests=st.sampled_from([0, 1, 1, 1, 3]),
    input_tokens=st.sampled_from([0, 1, 5, 500, 50_000_000]),
    output_tokens=st.sampled_from([0, 1, 7, 400]),
    cost_nano_usd=st.sampled_from([0, 1, 400, 900, 4 * 10**15]),
)
LEASES = st.sampled_from([f"lease-{idx}" for idx in range(8)])


class Scripts(RuleBasedStateMachine):
    """Whatever happens in whatever order, script and memory answer alike."""

    server: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.tenant = f"machine-{next(TENANTS)}"
        self.now_us = START_US
        self.memory = MemoryLimiter()

    @rule(step_us=st.sampled_from([1, 999, 1_000_000, 8_571_429, 31_000_000, 86_400_000_000]))
    def wait(self, step_us: int) -> None:
        self.now_us += step_us

    @rule(
        lease=LEASES,
        lease_us=st.sampled_from([1, 5_000_000, 60_000_000]),
        reserve=AMOUNTS,
        picks=st.lists(
            st.sampled_from(list(Kind)).flatmap(
                lambda kind: st.tuples(
                    st.just(kind),
                    st.sampled_from(MEASURES[kind]),
                    LIMITS[kind],
                    st.sampled_from("ab"),
                )
            ),
            max_size=5,
            unique_by=lambda pick: (pick[0], pick[1], pick[3]),
        ),
    )
    def admit(self, lease: str, lease_us: int, reserve: Amounts, picks: list) -> None:
        charges = [
            Charge(
                f"{kind.value}-{measure.value}:{scope}", kind, measure, limit, reserve.of(measure)
            )
            for kind, measure, limit, scope in picks
        ]
        it = plan(self.tenant, lease, lease_us, charges)
        reply = run(self.server, admit_command(it, self.now_us))
        expected = self.memory.admit(lease, lease_us, charges, self.now_us)
        assert decision_of(it, reply) == expected
        if expected.wait_us > 0 and not _only_polls(expected):
            self._check_wait(charges, expected)

    def _check_wait(self, charges: list[Charge], decision: Decision) -> None:
        # The binding charge alone: others may have grown shorter waits of their own meanwhile.
        binding = charges[decision.binding_idx]
        later_us = self.now_us + decision.wait_us
        assert self.memory._wait_us(binding, later_us) == 0 or binding.kind is Kind.SLOTS

    @rule(lease=LEASES, actual=AMOUNTS, foreign=st.booleans())
    def settle(self, lease: str, actual: Amounts, foreign: bool) -> None:
        command = settle_command(self.tenant, lease, actual, [], self.now_us)
        assert run(self.server, command) == self.memory.settle(lease, actual, self.now_us)

    @rule(leases=st.lists(LEASES, unique=True, max_size=4))
    def renew(self, leases: list[str]) -> None:
        reply = run(self.server, renew_command(self.tenant, leases, 20_000_000, self.now_us))
        assert [i.decode() for i in reply] == self.memory.renew(leases, 20_000_000, self.now_us)

    @invariant()
    def holds_are_those_of_live_leases(self) -> None:
        held = sum(budget.held for budget in self.memory.budgets.values())
        live = sum(
            charge.cost
            for lease in self.memory.leases.values()
            for charge, _ in lease.charges
            if charge.kind.is_budget
        )
        assert held == live


def _only_polls(decision: Decision) -> bool:
    return decision.wait_us <= 1_000_000


def test_script_and_memory_answer_alike(server: redis.Redis) -> None:
    """Any sequence of calls: the same outcomes, waits and states, to the microsecond."""

    class Machine(Scripts):
        pass

    Machine.server = server
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_month_windows_are_the_calendars(server: redis.Redis) -> None:
    """The script's calendar is Python's, leap years included, at both ends of each month."""
    it = plan("calendar", "none", 1, [Charge("m", Kind.MONTH_BUDGET, Measure.COST, 0, 1)])
    memory = MemoryLimiter()
    day_us = 86_400_000_000
    for day in range(20_000, 20_000 + 365 * 30, 13):
        for now_us in (day * day_us, (day + 1) * day_us - 1):
            decision = decision_of(it, run(server, admit_command(it, now_us)))
            assert decision == memory.admit("none", 1, it.charges, now_us)


def test_sources_use_no_undeclared_globals() -> None:
    """Redis refuses scripts that make globals; every script starts with the shared part."""
    for script in Script:
        assert source_of(script).startswith("-- Put before each script")
