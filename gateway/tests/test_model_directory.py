"""Models and replicas as the gateway sees them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from headrace_common.errors import ModelNotFound, NoReplica, ReplicaLost, Unavailable
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.router.v1.router_pb2 import Replica, ReplicaList
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_gateway import model_directory
from headrace_gateway.model_directory import ModelDirectory
from headrace_testing import byte_tokenizer as bt
from headrace_testing.waiting import eventually

TOKENIZER = bt.tokenizer_json()


class Lists:
    """The router's list, pushed by the test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[ReplicaList] = asyncio.Queue()

    async def watch_replicas(self) -> AsyncIterator[ReplicaList]:
        while True:
            yield await self.queue.get()


class Tokenizers:
    """Workers that give their tokenizer, or fail."""

    def __init__(self) -> None:
        self.data = TOKENIZER
        self.failures = 0
        self.num_fetches = 0
        self.kept: set[str] = set()

    async def fetch_tokenizer(self, address: str, model: str) -> bytes:
        self.num_fetches += 1
        if self.failures:
            self.failures -= 1
            raise ReplicaLost("not yet")
        return self.data

    async def forget_all_but(self, addresses: set[str]) -> None:
        self.kept = addresses


class Scene:
    """A directory that follows pushed lists."""

    def __init__(self) -> None:
        self.lists, self.workers = Lists(), Tokenizers()
        self.directory = ModelDirectory(self.lists, self.workers)
        self.task = asyncio.create_task(self.directory.watch())

    async def show(self, *replicas: Replica) -> None:
        self.lists.queue.put_nowait(ReplicaList(replicas=replicas))
        await asyncio.sleep(0.01)

    async def ready(self) -> None:
        await eventually(lambda: self.directory.is_ready)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await cancel_and_wait(made.task)
    await made.directory.close()


def replica(
    worker_id: str,
    incarnation: int = 1,
    state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY,
    *,
    reachable: bool = True,
    load_tokens: int = 0,
) -> Replica:
    card = pb.ModelCard(
        model="m",
        chat_template=bt.CHAT_TEMPLATE,
        tokenizer_sha256=hashlib.sha256(TOKENIZER).hexdigest(),
    )
    return Replica(
        replica=ReplicaRef(worker_id=worker_id, incarnation=incarnation),
        address=f"{worker_id}:1",
        state=state,
        reachable=reachable,
        models=[card],
        load=pb.LoadReport(running_tokens=load_tokens),
    )


async def test_states_of_a_model(scene: Scene) -> None:
    """Starting, loading, known, unknown, and known without a replica are told apart.

    A router that has just started lists nothing: a batch would lose its lines to "unknown".
    """
    with pytest.raises(NoReplica):
        scene.directory.get("m")
    await scene.show()
    with pytest.raises(NoReplica):
        scene.directory.get("m")
    scene.workers.failures = 1
    await scene.show(replica("a"))
    with pytest.raises(Unavailable):
        scene.directory.get("m")
    await scene.ready()
    assert scene.directory.get("m").encoder.encode_text("a").listed() == [97]
    with pytest.raises(ModelNotFound):
        scene.directory.get("other")
    await scene.show()
    assert not scene.directory.is_ready
    assert scene.directory.get("m").card.model == "m"


async def test_a_tokenizer_is_fetched_once_per_content(scene: Scene) -> None:
    """However many replicas and lists name it."""
    for _ in range(3):
        await scene.show(replica("a"), replica("b"))
    await scene.ready()
    await scene.show(replica("c"))
    assert scene.workers.num_fetches == 1


async def test_a_tokenizer_that_is_not_the_cards_is_refused(scene: Scene) -> None:
    """A wrong tokenizer would make wrong prompts: the model stays unavailable."""
    scene.workers.data = TOKENIZER + b" "
    await scene.show(replica("a"))
    await eventually(lambda: scene.workers.num_fetches)
    assert not scene.directory.is_ready
    scene.workers.data = TOKENIZER
    await scene.ready()


async def test_least_loaded(scene: Scene) -> None:
    """First by what runs from here, then by the last reports; only usable, not excluded ones."""
    await scene.show(
        replica("a", load_tokens=50),
        replica("b", load_tokens=10),
        replica("c", state=pb.WORKER_STATE_DRAINING),
        replica("d", reachable=False),
    )

    def choose(*excluded: str) -> str:
        refs = [ReplicaRef(worker_id=it, incarnation=1) for it in excluded]
        return scene.directory.least_loaded("m", refs).replica.worker_id

    assert choose() == "b"
    assert choose("b") == "a"
    with scene.directory.running_on(replica("b").replica, "b:1", lambda: None):
        assert choose() == "a"
    assert choose() == "b"
    with pytest.raises(NoReplica):
        choose("a", "b")
    with pytest.raises(NoReplica):
        scene.directory.least_loaded("other", [])


async def test_stuck_or_replaced_replicas_are_told(scene: Scene) -> None:
    """Absent or unreachable is not lost: a router that has just started lists nothing."""
    lost: list[str] = []
    await scene.show(replica("a"), replica("b"))
    with (
        scene.directory.running_on(replica("a").replica, "a:1", lambda: lost.append("a")),
        scene.directory.running_on(replica("b").replica, "b:1", lambda: lost.append("b")),
    ):
        await scene.show()
        await scene.show(replica("a", reachable=False))
        assert lost == []
        await scene.show(replica("a", state=pb.WORKER_STATE_STUCK), replica("b"))
        assert lost == ["a"]
        await scene.show(replica("b", incarnation=2))
        assert lost == ["a", "b"]


async def test_connections_of_gone_workers_are_dropped(scene: Scene) -> None:
    """But for those with streams under way, and never because of an empty list."""
    with scene.directory.running_on(replica("a").replica, "a:1", lambda: None):
        await scene.show(replica("b"))
        assert scene.workers.kept == {"a:1", "b:1"}
        await scene.show()
        assert scene.workers.kept == {"a:1", "b:1"}
    await scene.show(replica("b"))
    assert scene.workers.kept == {"b:1"}


async def test_following_is_told(scene: Scene) -> None:
    """While the list's stream is down nobody asks the router."""
    assert not scene.directory.is_following
    await scene.show()
    assert scene.directory.is_following
    await cancel_and_wait(scene.task)
    assert not scene.directory.is_following


def knows(scene: Scene, model: str) -> bool:
    """Whether a model can be served."""
    try:
        scene.directory.get(model)
    except Unavailable:
        return False
    return True


async def test_not_ready_before_each_listed_model_can_be_served(scene: Scene) -> None:
    """One tokenizer of two would let half of the requests be refused."""
    two = replica("b")
    two.models.append(pb.ModelCard(model="other", tokenizer_sha256="never there"))
    await scene.show(replica("a"), two)
    await eventually(lambda: knows(scene, "m"))
    assert not scene.directory.is_ready


async def test_a_dead_worker_holds_readiness_back_for_a_start_only(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would serve is waited for some seconds, not until it is given up."""
    told = ReplicaList(replicas=[replica("a")], has_undescribed_models=True)
    scene.lists.queue.put_nowait(told)
    await eventually(lambda: knows(scene, "m"))
    assert not scene.directory.is_ready
    later_s = time.monotonic() + 6.0
    monkeypatch.setattr(model_directory, "time", SimpleNamespace(monotonic=lambda: later_s))
    assert scene.directory.is_ready
    assert not await scene.directory.until_news()


async def test_a_new_tokenizer_is_news_and_no_reason_to_be_unready(scene: Scene) -> None:
    """A model that is replaced by a newer one of its name is waited for, the others served."""
    await scene.show(replica("a"))
    await scene.ready()
    scene.workers.failures = 2
    newer = replica("b", incarnation=2)
    newer.models[0].chat_template += "{# newer #}"
    another = replica("c")
    another.models[0].model = "another"
    await scene.show(newer, another)
    assert not knows(scene, "m")
    scene.directory._starts_until_s = time.monotonic()
    assert scene.directory.is_ready
    while not knows(scene, "m"):
        assert await scene.directory.until_news()
