"""Virtual token counters."""

from headrace_router.fairness import VirtualCounters


def test_the_tenant_served_least_ranks_first() -> None:
    """Output counts for more than input."""
    counters = VirtualCounters(output_weight=2.0, slack_tokens=0)
    counters.charge("a", prompt_tokens=100)
    counters.charge("b", output_tokens=60)
    assert counters.ranks(["a", "b"]) == {"a": 0.0, "b": 20.0}


def test_about_equal_is_equal() -> None:
    """Within the slack the order by length of work decides."""
    counters = VirtualCounters(output_weight=2.0, slack_tokens=50)
    counters.charge("a", prompt_tokens=50)
    counters.charge("b", prompt_tokens=200)
    assert counters.ranks(["a", "b", "new"]) == {"a": 0.0, "b": 200.0, "new": 0.0}


def test_idling_saves_nothing_up() -> None:
    """Who comes back is lifted to the least of those who wait."""
    counters = VirtualCounters(output_weight=2.0, slack_tokens=0)
    counters.charge("busy", prompt_tokens=1000)
    counters.arrive("idle", ["busy"])
    assert counters.ranks(["busy", "idle"]) == {"busy": 0.0, "idle": 0.0}


def test_memory_is_bounded() -> None:
    """Any number of tenants may pass by, through the queue or past it."""
    counters = VirtualCounters(output_weight=2.0, slack_tokens=0)
    for number in range(25_000):
        counters.arrive(f"t{number}", [])
        assert len(counters._served) <= 10_000
    for number in range(25_000):
        counters.charge(f"u{number}", prompt_tokens=number)
        assert len(counters._served) <= 10_000
    assert counters.ranks(["u24999", "new"])["u24999"] == 24_999
