"""Which workers are watched."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_common.errors import ModelNotFound, NoReplica
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.worker.v1.worker_pb2 import WORKER_STATE_LOADING, DescribeResponse
from headrace_router.discovery import MAX_START_S, Discovery, resolve_host
from headrace_testing.waiting import eventually


def loading(worker_id: str, incarnation: int) -> DescribeResponse:
    return DescribeResponse(
        replica={"worker_id": worker_id, "incarnation": incarnation}, state=WORKER_STATE_LOADING
    )


class Names:
    """A name service and watchers that never end."""

    def __init__(self) -> None:
        self.addresses: set[str] | None = set()
        self.watched: set[str] = set()

    async def resolve(self, _host: str, _port: int) -> set[str]:
        if self.addresses is None:
            raise OSError("no answer")
        return self.addresses

    async def follow(self, address: str) -> None:
        self.watched.add(address)
        try:
            await asyncio.Event().wait()
        finally:
            self.watched.discard(address)


@pytest.fixture
async def names(fleet) -> AsyncIterator[Names]:
    names = Names()
    discovery = Discovery(
        ["fixed:1", "dns:workers:7100"],
        fleet.table,
        names.follow,
        resolve=names.resolve,
        resolve_interval_s=0.01,
        on_failure=lambda: None,
        clock=fleet.clock,
    )
    running = asyncio.create_task(discovery.run())
    yield names
    await cancel_and_wait(running)
    assert names.watched == set()


async def test_workers_come_and_go_with_their_name(names: Names) -> None:
    """The fixed one stays."""
    await eventually(lambda: names.watched == {"fixed:1"})
    names.addresses = {"10.0.0.1:7100", "10.0.0.2:7100"}
    await eventually(lambda: names.watched == {"fixed:1", "10.0.0.1:7100", "10.0.0.2:7100"})
    names.addresses = {"10.0.0.2:7100"}
    await eventually(lambda: names.watched == {"fixed:1", "10.0.0.2:7100"})


async def test_a_worker_that_was_never_seen_may_serve_anything(names: Names, fleet) -> None:
    """Until it is described, or its name is gone."""
    fleet.add("fixed:1")
    await eventually(lambda: names.watched == {"fixed:1"})
    assert not fleet.table.has_undescribed_models()
    names.addresses = {"w1", "w2"}
    await eventually(lambda: len(names.watched) == 3)
    assert fleet.table.has_undescribed_models()
    fleet.add("w1")
    assert fleet.table.has_undescribed_models()
    names.addresses = {"w1"}
    await eventually(lambda: not fleet.table.has_undescribed_models())


async def test_a_worker_that_never_comes_up_is_not_waited_for_for_ever(
    names: Names, fleet, ask
) -> None:
    """An unknown model is then unknown, until the worker says what it serves after all."""
    fleet.add("fixed:1")
    names.addresses = {"w1"}
    await eventually(lambda: len(names.watched) == 2)
    # A start that fails again and again counts from its first beginning.
    fleet.table.describe("w1", loading("w1", 1))
    await asyncio.sleep(0.05)
    fleet.clock.advance(MAX_START_S - 1)
    fleet.table.describe("w1", loading("w1", 2))
    await asyncio.sleep(0.05)
    with pytest.raises(NoReplica):
        fleet.choose(ask(model="other"))
    fleet.clock.advance(1)
    await eventually(lambda: not fleet.table.has_undescribed_models())
    with pytest.raises(ModelNotFound):
        fleet.choose(ask(model="other"))
    fleet.add("w1", incarnation=3, model="other")
    assert fleet.choose(ask(model="other")) is not None
    # Its next life may serve something else.
    fleet.table.describe("w1", loading("w1", 4))
    assert fleet.table.has_undescribed_models()


async def test_no_answer_changes_nothing(names: Names) -> None:
    """A name service that is down does not take the fleet with it."""
    names.addresses = {"10.0.0.1:7100"}
    await eventually(lambda: len(names.watched) == 2)
    names.addresses = None
    await asyncio.sleep(0.05)
    assert names.watched == {"fixed:1", "10.0.0.1:7100"}


async def test_a_worker_that_still_answers_is_kept(names: Names, fleet) -> None:
    """It may drain after its name is gone."""
    names.addresses = {"w1"}
    await eventually(lambda: "w1" in names.watched)
    fleet.add("w1")
    names.addresses = set()
    await asyncio.sleep(0.05)
    assert "w1" in names.watched
    fleet.table.lose("w1")
    await eventually(lambda: "w1" not in names.watched)
    assert fleet.table.get("w1") is None


async def test_a_real_name_resolves() -> None:
    """With the system's own resolver."""
    assert "127.0.0.1:7100" in await resolve_host("127.0.0.1", 7100)
