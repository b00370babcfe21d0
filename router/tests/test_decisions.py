"""Remembered decisions."""

from headrace_router.decisions import MAX_CANDIDATES, RecentDecisions, to_message


def test_a_decision_tells_its_reasons(fleet, ask) -> None:
    """Every candidate with what it was judged by; the dropped one with the filter's name."""
    fleet.add("w1")
    fleet.add("w2")
    fleet.table.lose("w2")
    choice = fleet.choose(ask(100))
    message = to_message(ask(100), choice, queue_s=0.5, index_staleness_s=0.25)
    assert (message.replica.worker_id, message.address) == ("w1", "w1")
    assert (message.policy, message.queue_s, message.index_staleness_s) == ("hold", 0.5, 0.25)
    first, second = message.candidates
    assert (first.replica.worker_id, first.filtered_by) == ("w1", "")
    assert first.scores["own_s"] > 0
    assert (second.replica.worker_id, second.filtered_by) == ("w2", "unreachable")
    assert message.predicted_ttft_s == first.scores["own_s"]


def test_the_shadow_is_told_beside_the_choice(fleet, ask) -> None:
    """Its name, and its replica unless it would have let the request wait."""
    key = fleet.add("w1")
    choice = fleet.choose(ask(100))
    choice.shadow = ("min-ttft", key)
    message = to_message(ask(100), choice, queue_s=0.0, index_staleness_s=0.0)
    assert (message.shadow_policy, message.shadow_replica.worker_id) == ("min-ttft", "w1")
    choice.shadow = ("hold", None)
    message = to_message(ask(100), choice, queue_s=0.0, index_staleness_s=0.0)
    assert (message.shadow_policy, message.HasField("shadow_replica")) == ("hold", False)


def test_a_large_fleet_is_told_in_part(fleet, ask) -> None:
    """The chosen one first, then the best."""
    for number in range(MAX_CANDIDATES + 20):
        fleet.add(f"w{number}")
    choice = fleet.choose(ask(100))
    message = to_message(ask(100), choice, queue_s=0.0, index_staleness_s=0.0)
    assert len(message.candidates) == MAX_CANDIDATES
    assert message.candidates[0].replica == message.replica


def test_only_the_last_ones_are_remembered(fleet, ask) -> None:
    """Memory is bounded; a second attempt replaces the first."""
    fleet.add("w1")
    recent = RecentDecisions(2)
    for request_id in ("a", "b", "a", "c"):
        query = ask(request_id=request_id)
        recent.add(to_message(query, fleet.choose(query), queue_s=0.0, index_staleness_s=0.0))
    assert recent.get("b") is None
    assert recent.get("a").request_id == "a"
    assert recent.get("c").request_id == "c"
