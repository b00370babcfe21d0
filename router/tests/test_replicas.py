"""The replica table."""

import pytest

from headrace_contracts.worker.v1.worker_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    DescribeResponse,
    LoadReport,
    ModelCard,
)
from headrace_router.replicas import MAX_REPORT_AGE_S


def test_a_described_worker_serves_its_models(fleet) -> None:
    """It is found under each of them, and under no other."""
    key = fleet.add("w1")
    assert [one.key for one in fleet.table.serving("m")] == [key]
    assert fleet.table.serving("other") == []


def test_a_broken_stream_makes_it_unreachable_at_once(fleet) -> None:
    """Whatever it last said; and it stays known, so that its models do."""
    fleet.add("w1")
    fleet.table.lose("w1")
    (one,) = fleet.table.serving("m")
    assert not one.is_reachable
    assert not one.is_ready(fleet.clock.now_s())


def test_no_worker_is_counted_on_before_it_reports(fleet) -> None:
    """Nor again, once it could not be reached: that may be picked which was told to gateways."""
    key = fleet.add("w1")
    (one,) = fleet.table.serving("m")
    for _ in range(2):
        fleet.table.lose("w1")
        assert not one.is_heard
        described = DescribeResponse(
            replica=key.to_ref(), state=WORKER_STATE_READY, models=[ModelCard(model="m")]
        )
        fleet.table.describe("w1", described)
        assert not one.is_heard
        assert not one.is_ready(fleet.clock.now_s())
        before = fleet.table.version
        fleet.report(key)
        assert one.is_heard
        assert one.is_ready(fleet.clock.now_s())
        assert fleet.table.version > before


def test_a_silent_worker_is_not_ready(fleet) -> None:
    """A frozen worker keeps its connection and says nothing."""
    fleet.add("w1")
    (one,) = fleet.table.serving("m")
    fleet.clock.advance(MAX_REPORT_AGE_S)
    assert one.is_ready(fleet.clock.now_s())
    fleet.clock.advance(0.01)
    assert not one.is_ready(fleet.clock.now_s())


def test_a_silent_worker_is_told_of_until_it_reports(fleet) -> None:
    """So that whoever reads the list knows that a pick would refuse it. Told once."""
    key, other = fleet.add("w1"), fleet.add("w2")
    fleet.clock.advance(MAX_REPORT_AGE_S + 0.01)
    fleet.report(other)
    before = fleet.table.version
    for _ in range(2):
        fleet.table.note_silent(fleet.clock.now_s())
        assert [it.is_heard for it in fleet.table.all()] == [False, True]
    assert fleet.table.version == before + 1
    fleet.report(key)
    assert [it.is_ready(fleet.clock.now_s()) for it in fleet.table.all()] == [True, True]


def test_another_incarnation_is_another_replica(fleet) -> None:
    """Nothing known of the former life is kept; its reports are not mistaken for the new one's."""
    old = fleet.add("w1", incarnation=1)
    fleet.report(old, num_running=9)
    new = fleet.add("w1", incarnation=2)
    (one,) = fleet.table.serving("m")
    assert one.key == new
    assert one.report.num_running == 0
    assert not fleet.report(old)


def test_a_report_of_an_unknown_life_asks_for_a_description(fleet) -> None:
    """The worker restarted between two reports."""
    key = fleet.add("w1")
    assert not fleet.report(key._replace(incarnation=2))
    assert fleet.report(key)


def test_a_loading_worker_is_described_again_when_ready(fleet) -> None:
    """While loading it names no models."""
    loading = DescribeResponse(
        replica={"worker_id": "w1", "incarnation": 1}, state=WORKER_STATE_LOADING
    )
    fleet.table.describe("w1", loading)
    assert fleet.table.has_undescribed_models()
    ready = LoadReport(replica=loading.replica, state=WORKER_STATE_READY)
    assert not fleet.table.report("w1", ready, fleet.clock.now_s())


def test_listeners_hear_of_load_but_versions_count_changes(fleet) -> None:
    """A version is a change of the list, not of load."""
    key = fleet.add("w1")
    heard = []
    fleet.table.on_change(lambda: heard.append(fleet.table.version))
    version = fleet.table.version
    fleet.report(key, num_running=5)
    fleet.report(key, WORKER_STATE_DRAINING)
    assert heard == [version, version + 1]


@pytest.mark.parametrize("first_lives", [True, False])
def test_two_addresses_of_one_worker_are_one_replica(fleet, first_lives: bool) -> None:
    """The reachable one counts, so that load is not split."""
    fleet.add("w1")
    (one,) = fleet.table.serving("m")
    described = DescribeResponse(
        replica=one.key.to_ref(), state=WORKER_STATE_READY, models=[ModelCard(model="m")]
    )
    fleet.table.describe("w1-again", described)
    fleet.table.lose("w1-again" if first_lives else "w1")
    (one,) = fleet.table.serving("m")
    assert one.is_reachable
    assert one.address == ("w1" if first_lives else "w1-again")
