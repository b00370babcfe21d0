"""The scripts against the limiter in memory, on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headrace_ratelimit.limiter import (
    POLL_US,
    Amounts,
    Charge,
    Kind,
    Measure,
    MemoryLimiter,
    Outcome,
)
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
NUMBERS = itertools.count()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def run(server: redis.Redis, command: Command) -> object:
    return server.eval(source_of(command.script), 1, command.key, *command.args)


def plan(tenant: str, lease: str, lease_us: int, charges: list[Charge]) -> Plan:
    return Plan(tenant, lease, lease_us, False, charges, [Place(1, 1)] * len(charges))


def charge(kind: Kind, measure: Measure, limit: int, scope: str = "a") -> Charge:
    return Charge(f"{kind.value}-{measure.value}:{scope}", kind, measure, limit, 0)


# Few names with limits that a handful of requests reaches, some of them with a second limit (a plan
# that was changed), and the largest numbers there may be.
CHARGES = [
    charge(Kind.RATE, Measure.REQUESTS, 2),
    charge(Kind.RATE, Measure.REQUESTS, 7),
    charge(Kind.RATE, Measure.INPUT_TOKENS, 11),
    charge(Kind.RATE, Measure.OUTPUT_TOKENS, 10),
    charge(Kind.RATE, Measure.TOKENS, 13),
    charge(Kind.RATE, Measure.TOKENS, 10**12, "vast"),
    charge(Kind.DAY_COUNT, Measure.REQUESTS, 3),
    charge(Kind.SLOTS, Measure.LEASES, 1),
    charge(Kind.SLOTS, Measure.LEASES, 2),
    charge(Kind.DAY_BUDGET, Measure.COST, 1000),
    charge(Kind.MONTH_BUDGET, Measure.COST, 1500),
    charge(Kind.TOTAL_BUDGET, Measure.COST, 2000),
    charge(Kind.TOTAL_BUDGET, Measure.COST, 0, "none"),
    charge(Kind.MONTH_BUDGET, Measure.COST, 9 * 10**15, "vast"),
]
RESERVES = st.builds(
    Amounts,
    requests=st.sampled_from([1, 1, 1, 0, 2]),
    input_tokens=st.sampled_from([0, 1, 5]),
    output_tokens=st.sampled_from([0, 1, 7, 12]),
    cost_nano_usd=st.sampled_from([0, 400, 1000, 1001]),
)
ACTUALS = st.builds(
    Amounts,
    requests=st.sampled_from([1, 1, 0]),
    input_tokens=st.sampled_from([0, 5, 50_000_000]),
    output_tokens=st.sampled_from([0, 1, 15]),
    cost_nano_usd=st.sampled_from([0, 399, 1000, 4 * 10**15]),
)
LIVES_US = st.sampled_from([60_000_000, 5_000_000, 1])


def _picks() -> st.SearchStrategy[list[Charge]]:
    return st.lists(
        st.sampled_from(CHARGES), min_size=1, max_size=4, unique_by=lambda pick: pick.name
    )


class Scripts(RuleBasedStateMachine):
    """Whatever happens in whatever order, script and memory answer alike."""

    server: redis.Redis
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.tenant = f"machine-{next(TENANTS)}"
        self.now_us = START_US
        self.memory = MemoryLimiter()
        self.last_wait_us = 0

    @rule(step_us=st.sampled_from([1, 999, 4_999_999, 8_571_429, 31_000_000, 86_400_000_000]))
    def wait(self, step_us: int) -> None:
        self.now_us += step_us

    @rule()
    def wait_as_told(self) -> None:
        self.now_us += self.last_wait_us

    @rule(target=leases, lease_us=LIVES_US, reserve=RESERVES, picks=_picks())
    def admit(self, lease_us: int, reserve: Amounts, picks: list[Charge]) -> str:
        lease = f"lease-{next(NUMBERS)}"
        self._admit(lease, lease_us, reserve, picks)
        return lease

    @rule(lease=leases, lease_us=LIVES_US, reserve=RESERVES, picks=_picks())
    def admit_again(self, lease: str, lease_us: int, reserve: Amounts, picks: list[Charge]) -> None:
        self._admit(lease, lease_us, reserve, picks)

    def _admit(self, lease: str, lease_us: int, reserve: Amounts, picks: list[Charge]) -> None:
        charges = [replace(pick, cost=reserve.of(pick.measure)) for pick in picks]
        it = plan(self.tenant, lease, lease_us, charges)
        reply = run(self.server, admit_command(it, self.now_us))
        expected = self.memory.admit(lease, lease_us, charges, self.now_us)
        assert decision_of(it, reply) == expected
        self.last_wait_us = max(0, expected.wait_us)
        if expected.outcome is Outcome.DENIED and expected.wait_us > POLL_US:
            # The wait is true: all charges pass then, and the binding one not earlier.
            later_us = self.now_us + expected.wait_us
            waits = [self.memory._wait_us(c, later_us) for c in charges]
            assert max(waits) <= POLL_US
            assert self.memory._wait_us(charges[expected.binding_idx], later_us - 1) != 0

    @rule(lease=leases, actual=ACTUALS)
    def settle(self, lease: str, actual: Amounts) -> None:
        command = settle_command(self.tenant, lease, actual, [], self.now_us)
        assert run(self.server, command) == self.memory.settle(lease, actual, self.now_us)

    @rule(picked=st.lists(leases, unique=True, min_size=1, max_size=4))
    def renew(self, picked: list[str]) -> None:
        reply = run(self.server, renew_command(self.tenant, picked, 20_000_000, self.now_us))
        assert [i.decode() for i in reply] == self.memory.renew(picked, 20_000_000, self.now_us)

    @rule()
    def look(self) -> None:
        """Compare everything that is counted."""
        by_name = {pick.name: pick for pick in CHARGES}
        self._admit("look", 1, Amounts(), list(by_name.values()))
        run(self.server, settle_command(self.tenant, "look", Amounts(), [], self.now_us))
        self.memory.settle("look", Amounts(), self.now_us)

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


def test_script_and_memory_answer_alike(server: redis.Redis) -> None:
    """Any sequence of calls: the same outcomes, waits and states, to the microsecond."""

    class Machine(Scripts):
        pass

    Machine.server = server
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
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
