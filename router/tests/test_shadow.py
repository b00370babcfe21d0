"""A policy that is scored and not used."""

from random import Random

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate
from headrace_router.metrics import RouterMetrics
from headrace_router.pick import Choice
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policies.min_ttft import MinTtftPolicy
from headrace_router.replicas import Replica
from headrace_router.shadow import Shadow


@pytest.mark.parametrize(
    ("chosen", "result"), [("near", "same"), ("far", "other")], ids=["agrees", "differs"]
)
def test_agreement_is_counted_and_the_choice_stays(ask, chosen: str, result: str) -> None:
    """The explanation names the shadow's choice; nothing of the real one changes."""
    candidates = {
        name: Candidate(Replica(name, ReplicaKey(name, 1)), own_s=own_s, total_score=7.0)
        for name, own_s in (("near", 0.1), ("far", 2.0))
    }
    candidates["lost"] = Candidate(Replica("lost", ReplicaKey("lost", 1)), "unreachable")
    policy = HoldPolicy(HoldParameters(), Random(1))
    choice = Choice(candidates[chosen], list(candidates.values()), policy, 0.0)
    metrics = RouterMetrics(CollectorRegistry())
    Shadow(metrics).compare(ask(), choice, MinTtftPolicy(Random(1)))
    counted = metrics.shadow_decisions.labels("min-ttft", result)._value.get()
    assert counted == 1
    assert choice.shadow == ("min-ttft", ReplicaKey("near", 1))
    assert choice.chosen is candidates[chosen]
    assert [one.total_score for one in choice.candidates] == [7.0, 7.0, 0.0]


def test_a_shadow_that_would_wait_says_so(ask) -> None:
    """Holding is an answer too."""
    busy = Candidate(Replica("w", ReplicaKey("w", 1)), backlog_s=5.0)
    choice = Choice(busy, [busy], MinTtftPolicy(Random(1)), 0.0)
    metrics = RouterMetrics(CollectorRegistry())
    Shadow(metrics).compare(ask(), choice, HoldPolicy(HoldParameters(), Random(1)))
    assert metrics.shadow_decisions.labels("hold", "wait")._value.get() == 1
    assert choice.shadow == ("hold", None)
