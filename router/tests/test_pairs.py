"""When a prompt is computed elsewhere, and what that books."""

from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_contracts.worker.v1.worker_pb2 import POOL_ROLE_DECODE, POOL_ROLE_PREFILL
from headrace_router.decisions import to_message
from headrace_router.desk import PickDesk, Ticket
from headrace_router.metrics import RouterMetrics
from headrace_router.pairs import PairRules, find_pair
from headrace_router.pick import Choice
from headrace_router.policy_file import load_policy_file

RULES = PairRules(setup_s=0.02, transfer_bytes_per_s=1e9, stall_weight=0.5)
D, P = ReplicaKey("d", 1), ReplicaKey("p", 1)


@pytest.fixture
def pool(fleet):
    """A decode and a prefill replica; 1,000 tokens a second, 10 kB a token."""
    fleet.add("d", role=POOL_ROLE_DECODE, kv_bytes_per_token=10_000)
    fleet.add("p", role=POOL_ROLE_PREFILL, kv_bytes_per_token=10_000)
    return fleet


def pair(fleet, query, rules=RULES):
    choice = fleet.choose(query)
    assert choice.chosen.key == D
    return find_pair(query, choice.chosen, choice.candidates, rules), choice.chosen


def test_a_busy_decode_replica_gets_its_prompt_computed_elsewhere(pool, ask) -> None:
    """Two streams would each be held up by a second; the transfer takes 30 ms."""
    pool.report(D, num_running=2)
    found, chosen = pair(pool, ask(prompt_tokens=1000))
    assert found is not None
    assert found.prefill.key == P
    assert found.pair_s == pytest.approx(1.0 + 0.02 + 0.01)
    assert chosen.scores["direct_s"] == pytest.approx(1.0 + 0.5 * 2 * 1.0)


def test_an_idle_replica_computes_for_itself(pool, ask) -> None:
    """Nobody is held up, and the transfer would come on top."""
    assert pair(pool, ask(prompt_tokens=1000))[0] is None


def test_a_short_uncached_part_stays_where_it_is(pool, ask) -> None:
    """The set-up costs more than what it spares: here below 20 tokens."""
    pool.report(D, num_running=2)
    assert pair(pool, ask(prompt_tokens=19))[0] is None
    assert pair(pool, ask(prompt_tokens=40))[0] is not None


def test_a_long_queue_of_prompts_is_passed_by(pool, ask) -> None:
    """The prefill pool has its own backlog."""
    pool.report(D, num_running=2)
    pool.report(P, queued_prefill_tokens=1000)
    assert pair(pool, ask(prompt_tokens=1000))[0] is None


def test_a_full_prefill_replica_is_passed_by(pool, ask) -> None:
    """It would refuse the prompt, however little it has to compute."""
    pool.report(D, num_running=2)
    pool.report(P, num_running=4, max_requests=4)
    assert pair(pool, ask(prompt_tokens=1000))[0] is None
    pool.report(P, num_running=3, max_requests=4)
    assert pair(pool, ask(prompt_tokens=1000))[0] is not None


def test_only_replicas_with_the_same_model_and_a_clean_bill_pair(pool, ask) -> None:
    """Another size of KV, or gone: no pair."""
    pool.report(D, num_running=2)
    pool.table.lose("p")
    assert pair(pool, ask(prompt_tokens=1000))[0] is None
    pool.add("p", 2, role=POOL_ROLE_PREFILL, kv_bytes_per_token=999)
    assert pair(pool, ask(prompt_tokens=1000))[0] is None


def desk(fleet) -> PickDesk:
    file = load_policy_file(None)
    at_once = file.hold.model_copy(update={"gather_s": 0.0})
    return PickDesk(
        fleet.pipeline,
        fleet.loads,
        fleet.predictor,
        fleet.decode,
        file.model_copy(update={"hold": at_once}),
        fleet.clock,
        Random(1),
        RouterMetrics(CollectorRegistry()),
    )


def submit(fleet, query) -> tuple[Ticket, Choice]:
    chosen: list[Choice] = []
    ticket = desk(fleet).submit(query, None, chosen.append)  # type: ignore[arg-type]  # never an error
    return ticket, chosen[0]


def test_both_sides_are_booked_and_given_back_once(pool, ask) -> None:
    """The prompt's work until the first token, the rest until the end."""
    pool.report(D, num_running=2)
    query = ask(prompt_tokens=1000)
    ticket, choice = submit(pool, query)
    told = to_message(query, choice, queue_s=0.0, index_staleness_s=0.0)
    assert (told.replica.worker_id, told.prefill_replica.worker_id) == ("d", "p")
    assert told.prefill_address == "p"
    assert told.predicted_ttft_s == pytest.approx(choice.pair.pair_s)
    assert pool.loads.load(P, None).backlog_tokens == 1000
    assert pool.loads.load(D, None).backlog_tokens == 16
    ticket.progress(PickProgress(first_token=True, ttft_s=1.1))
    assert pool.loads.load(P, None).num_requests == 0
    assert pool.loads.load(D, None)[:3] == (0, 1000, 1)
    ticket.close()
    ticket.close()
    assert pool.loads.num_requests() == 0


def test_a_request_that_ends_early_gives_back_both(pool, ask) -> None:
    """No first token ever came."""
    pool.report(D, num_running=2)
    ticket, _ = submit(pool, ask(prompt_tokens=1000))
    assert pool.loads.num_requests() == 2
    ticket.close()
    assert pool.loads.num_requests() == 0


def test_a_higher_price_of_the_transfer_keeps_more_at_home(pool, ask) -> None:
    """The rate is a knob."""
    pool.report(D, num_running=2)
    slow = replace(RULES, transfer_bytes_per_s=1e6)
    assert pair(pool, ask(prompt_tokens=1000), slow)[0] is None
