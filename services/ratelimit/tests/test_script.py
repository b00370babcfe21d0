"""The script against the limiter in memory, on a real server with a clock of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headrace_common.limits.limiter import (
    POLL_US,
    Amounts,
    Charge,
    Decision,
    Kind,
    Measure,
    Mode,
    Outcome,
    rate_state,
    window_state,
)
from headrace_common.limits.memory_limiter import Hold, MemoryLimiter
from headrace_common.limits.plans import ChargeSet, Place, Plan, answer_of
from headrace_ratelimit.store import (
    Op,
    admit_op,
    answer_of_reply,
    call_args,
    library,
    renew_op,
    seed_op,
    settle_op,
    unpacked,
    windows_of,
)

pytestmark = pytest.mark.redis

# 2026-11-30 23:59:30 UTC: day and month end soon.
START_US = 1_796_083_170_000_000
TENANTS = itertools.count()
NUMBERS = itertools.count()


def decision_of(charges: ChargeSet, reply: Any) -> Decision:
    """Decode the answer to an admission, as plainly as can be."""
    outcome = Outcome(reply[0])
    if outcome is Outcome.UNSEEDED:
        return Decision(outcome, -1, 0, [])
    states = [
        (rate_state if charge.kind is Kind.RATE else window_state)(charge.limit, used, rest)
        for charge, used, rest in zip(charges.charges, reply[3::2], reply[4::2], strict=True)
    ]
    return Decision(outcome, reply[1], reply[2], states)


class Script:
    """The script on a server."""

    def __init__(self, server: redis.Redis) -> None:
        self.server = server
        self._name = library().name
        server.function_load(library().text, replace=True)

    def run(self, ops: list[Op], now_us: int, *, has_ledger: bool = False) -> list[Any]:
        key, *args = call_args(ops, has_ledger=has_ledger, now_us=now_us)
        return [unpacked(it) for it in self.server.fcall(self._name, 1, key, *args)]

    def forget(self, tenant: str) -> None:
        keys = self.server.keys(f"hr:rl:{{{tenant}}}*")
        if keys:
            self.server.delete(*keys)


@pytest.fixture
def script(redis_url: str) -> Iterator[Script]:
    with redis.Redis.from_url(redis_url) as client:
        yield Script(client)


def plan(
    tenant: str,
    lease: str,
    charges: list[Charge],
    amounts: Amounts,
    lease_us: int = 60_000_000,
    mode: Mode = Mode.NORMAL,
) -> Plan:
    charge_set = ChargeSet(tuple(charges), (Place(1, 1, "a"),) * len(charges))
    return Plan(tenant, lease, lease_us, False, charge_set, amounts, mode)


def charge(kind: Kind, measure: Measure, limit: int, scope: str = "a") -> Charge:
    return Charge(scope, kind, measure, limit)


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
BUDGETS = [it for it in CHARGES if it.kind.is_budget]
RESERVES = st.builds(
    Amounts,
    requests=st.sampled_from([1, 1, 1, 0, 2]),
    input_tokens=st.sampled_from([5, 5, 1, 7]),
    output_tokens=st.sampled_from([0, 1, 7, 12]),
    cost_nano_usd=st.sampled_from([0, 400, 1000, 1001]),
    cached_input_tokens=st.sampled_from([0, 0, 1]),
)
ACTUALS = st.builds(
    Amounts,
    requests=st.sampled_from([1, 1, 0]),
    input_tokens=st.sampled_from([5, 6, 50_000_000]),
    output_tokens=st.sampled_from([0, 1, 15]),
    cost_nano_usd=st.sampled_from([0, 399, 1000, 4 * 10**15]),
    cached_input_tokens=st.sampled_from([0, 0, 4]),
)
LIVES_US = st.sampled_from([60_000_000, 5_000_000, 1])
MODES = st.sampled_from([Mode.NORMAL, Mode.NORMAL, Mode.NORMAL, Mode.RESTORE, Mode.PEEK])


def _picks(charges: list[Charge] = CHARGES) -> st.SearchStrategy[list[Charge]]:
    return st.lists(
        st.sampled_from(charges), min_size=1, max_size=4, unique_by=lambda pick: pick.name
    )


class Scripts(RuleBasedStateMachine):
    """Whatever happens in whatever order, alone or together, script and memory answer alike."""

    script: Script
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.tenant = f"machine-{next(TENANTS)}"
        self.now_us = START_US
        self.memory = MemoryLimiter()
        self.last_wait_us = 0
        # Operations of one call of the script, each with what its answer must pass.
        self.pending: list[tuple[Op, Callable[[Any], None]]] = []
        self.is_collecting = False

    @initialize(has_ledger=st.booleans())
    def choose(self, has_ledger: bool) -> None:
        self.memory.has_ledger = has_ledger

    def _later(self, op: Op, check: Callable[[Any], None]) -> None:
        self.pending.append((op, check))
        if not self.is_collecting:
            self._run()

    def _run(self) -> None:
        pending, self.pending, self.is_collecting = self.pending, [], False
        if pending:
            ops = [op for op, _ in pending]
            has_ledger = self.memory.has_ledger
            replies = self.script.run(ops, self.now_us, has_ledger=has_ledger)
            for (_, check), reply in zip(pending, replies, strict=True):
                check(reply)

    @rule()
    def collect(self) -> None:
        self.is_collecting = True

    @rule(step_us=st.sampled_from([1, 999, 4_999_999, 8_571_429, 31_000_000, 86_400_000_000]))
    def wait(self, step_us: int) -> None:
        self._run()
        self.now_us += step_us

    @rule()
    def wait_as_told(self) -> None:
        self._run()
        self.now_us += self.last_wait_us

    @rule(target=leases, lease_us=LIVES_US, reserve=RESERVES, picks=_picks(), mode=MODES)
    def admit(self, lease_us: int, reserve: Amounts, picks: list[Charge], mode: Mode) -> str:
        lease = f"lease-{next(NUMBERS)}"
        self._admit(lease, lease_us, reserve, picks, mode)
        return lease

    @rule(lease=leases, lease_us=LIVES_US, reserve=RESERVES, picks=_picks(), mode=MODES)
    def admit_again(
        self, lease: str, lease_us: int, reserve: Amounts, picks: list[Charge], mode: Mode
    ) -> None:
        self._admit(lease, lease_us, reserve, picks, mode)

    def _admit(
        self, lease: str, lease_us: int, reserve: Amounts, picks: list[Charge], mode: Mode
    ) -> None:
        it = plan(self.tenant, lease, picks, reserve, lease_us, mode)
        expected = self.memory.admit(lease, lease_us, picks, reserve, self.now_us, mode)

        def check(reply: Any) -> None:
            assert decision_of(it.charges, reply) == expected
            if expected.outcome is not Outcome.UNSEEDED:
                answer = answer_of_reply(it.charges, reply)
                assert answer == answer_of(it, expected)
                brief = answer_of_reply(it.charges, reply, is_brief=True)
                assert list(brief.remaining) == [state.remaining for state in answer.states]
                assert list(brief.reset_us) == [state.reset_us for state in answer.states]

        self._later(admit_op(it), check)
        self.last_wait_us = max(0, expected.wait_us)
        if expected.outcome is Outcome.DENIED and expected.wait_us > POLL_US:
            # The wait is true: all charges pass then, and the binding one not earlier.
            later_us = self.now_us + expected.wait_us
            waits = [self.memory.wait_us(c, reserve.of(c.measure), later_us) for c in picks]
            assert max(waits) <= POLL_US
            binding = picks[expected.binding_idx]
            cost = reserve.of(binding.measure)
            assert self.memory.wait_us(binding, cost, later_us - 1) != 0

    @rule(lease=leases, actual=ACTUALS)
    def settle(self, lease: str, actual: Amounts) -> None:
        expected = self.memory.settle(lease, actual, self.now_us)

        def check(reply: Any) -> None:
            assert reply == expected

        self._later(settle_op(self.tenant, lease, actual, []), check)

    @rule(picked=st.lists(leases, unique=True, min_size=1, max_size=4))
    def renew(self, picked: list[str]) -> None:
        expected = self.memory.renew(picked, 20_000_000, self.now_us)

        def check(reply: Any) -> None:
            assert [i.decode() for i in reply] == expected

        self._later(renew_op(self.tenant, picked, 20_000_000), check)

    @rule(
        budgets=_picks(BUDGETS),
        spent=st.sampled_from([0, 1, 900, 1400]),
        held=st.lists(leases, unique=True, max_size=2),
        cost=st.sampled_from([0, 300]),
    )
    def seed(self, budgets: list[Charge], spent: int, held: list[str], cost: int) -> None:
        """The ledger's word: some of the leases may be live, settled or lost by now."""
        spends = [(it, self.now_us, spent) for it in budgets]
        holds = [Hold(lease, budgets, self.now_us, cost) for lease in held]
        expected = self.memory.seed(spends, holds, 7_000_000, self.now_us)

        def check(reply: Any) -> None:
            assert reply == expected

        self._later(seed_op(self.tenant, spends, holds, 7_000_000), check)

    @rule()
    def lose_everything(self) -> None:
        self._run()
        self.script.forget(self.tenant)
        self.memory = MemoryLimiter(self.memory.has_ledger)

    @rule()
    def look(self) -> None:
        """Compare everything that is counted."""
        by_name = {pick.name: pick for pick in CHARGES}
        self._admit("look", 1, Amounts(), list(by_name.values()), Mode.PEEK)

    @invariant()
    def holds_are_those_of_live_leases(self) -> None:
        held = sum(budget.held for budget in self.memory.budgets.values())
        live = sum(
            lease.amounts.cost_nano_usd
            for lease in self.memory.leases.values()
            for charge in lease.charges
            if charge.kind.is_budget
        )
        assert held == live

    def teardown(self) -> None:
        self._run()
        self.script.forget(self.tenant)


def test_script_and_memory_answer_alike(script: Script) -> None:
    """Any sequence of calls: the same outcomes, waits and states, to the microsecond."""

    class Machine(Scripts):
        pass

    Machine.script = script
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_month_windows_are_the_calendars(script: Script) -> None:
    """The script's calendar is Python's, leap years included, at both ends of each month."""
    month = Charge("m", Kind.MONTH_BUDGET, Measure.COST, 0)
    amounts = Amounts(cost_nano_usd=1)
    it = plan("calendar", "none", [month], amounts)
    memory = MemoryLimiter()
    day_us = 86_400_000_000
    for day in range(20_000, 20_000 + 365 * 30, 13):
        for now_us in (day * day_us, (day + 1) * day_us - 1):
            (reply,) = script.run([admit_op(it)], now_us)
            expected = memory.admit("none", 1, [month], amounts, now_us)
            assert decision_of(it.charges, reply) == expected


def test_a_missing_budget_names_the_windows_to_ask_for(script: Script) -> None:
    """The ledger is asked for exactly the window that Redis would count in."""
    charges = [charge(Kind.RATE, Measure.REQUESTS, 7), *BUDGETS[:3]]
    it = plan(f"windows-{next(TENANTS)}", "l", charges, Amounts(requests=1))
    (reply,) = script.run([admit_op(it)], START_US, has_ledger=True)
    assert decision_of(it.charges, reply).outcome is Outcome.UNSEEDED
    day, month, total = (window for _, window in windows_of(it.charges, reply))
    assert (day.from_us, day.to_us) == (1_795_996_800_000_000, 1_796_083_200_000_000)
    assert (month.from_us, month.to_us) == (1_793_491_200_000_000, 1_796_083_200_000_000)
    assert (total.from_us, total.to_us) == (0, 0)


def test_a_window_that_begins_after_the_tenants_data_needs_no_ledger(script: Script) -> None:
    """Midnight is no outage: a new day's budget is unused, not lost."""
    tenant = f"midnight-{next(TENANTS)}"
    day = BUDGETS[0]
    it = plan(tenant, "l", [day], Amounts(cost_nano_usd=1))
    script.run([seed_op(tenant, [(day, START_US, 5)], [], 1)], START_US, has_ledger=True)
    (reply,) = script.run([admit_op(it)], START_US + 60_000_000, has_ledger=True)
    decision = decision_of(it.charges, reply)
    assert decision.outcome is Outcome.ADMITTED
    assert decision.states[0].remaining == 1000 - 1


def test_a_clock_that_is_set_back_gives_nothing_twice(script: Script) -> None:
    """What was used in a day to come is used: a store that starts anew with an earlier time."""
    tenant = f"back-{next(TENANTS)}"
    charges = [
        charge(Kind.RATE, Measure.REQUESTS, 1),
        charge(Kind.DAY_COUNT, Measure.REQUESTS, 1, "b"),
        charge(Kind.DAY_BUDGET, Measure.COST, 5, "c"),
    ]
    ahead_us = START_US + 86_400_000_000
    for number, one in enumerate(charges):
        spent = Amounts(requests=1, cost_nano_usd=5)
        first = admit_op(plan(tenant, f"a{number}", [one], spent))
        (reply,) = script.run([first], ahead_us)
        assert reply[0] == Outcome.ADMITTED.value
        (reply,) = script.run([admit_op(plan(tenant, f"b{number}", [one], spent))], START_US)
        assert reply[0] == Outcome.DENIED.value, one
        if one.kind is Kind.RATE:
            # A minute of use and one of debt at most, not a day.
            assert reply[2] <= 120_000_000
            later = admit_op(plan(tenant, "c", [one], spent))
            assert script.run([later], START_US + reply[2])[0][0] == Outcome.ADMITTED.value


def test_no_name_of_a_model_is_another_ones_key(script: Script) -> None:
    """Names hold colons: each has its own slots and its own record, whatever it is called."""
    tenant = f"names-{next(TENANTS)}"
    scopes = ["4:acme/foo", *(f"4:acme/foo:{it}" for it in ("slots", "live", "holds", "since"))]
    charges = [
        charge(kind, Measure.REQUESTS, 9, scope)
        for scope in scopes
        for kind in (Kind.SLOTS, Kind.RATE)
    ]
    amounts = Amounts(requests=1)
    for used in range(1, 4):
        it = plan(tenant, f"lease {used}", charges, amounts)
        (reply,) = script.run([admit_op(it)], START_US)
        assert [state.remaining for state in decision_of(it.charges, reply).states] == [
            9 - used
        ] * len(charges)
    script.forget(tenant)


def test_every_key_ends_by_itself_but_for_what_is_spent_in_total(script: Script) -> None:
    """Nothing of a tenant that never comes back stays for ever, other than its total budgets."""
    tenant = f"ends-{next(TENANTS)}"
    by_name = {pick.name: pick for pick in CHARGES if pick.limit}
    it = plan(tenant, "l", list(by_name.values()), Amounts(requests=1, cost_nano_usd=1))
    (reply,) = script.run([admit_op(it)], 0)
    assert decision_of(it.charges, reply).outcome is Outcome.ADMITTED
    keys = script.server.keys(f"hr:rl:{{{tenant}}}*")
    lasting = {key.decode() for key in keys if script.server.pttl(key) < 0}
    assert lasting == {f"hr:rl:{{{tenant}}}:a"}
    script.forget(tenant)
