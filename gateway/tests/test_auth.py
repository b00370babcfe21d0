"""Keys: what is cached, for how long, and when it is dropped."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import (
    HeadraceError,
    KeyRevoked,
    ModelNotAllowed,
    ReplicaLost,
    Unavailable,
    UnknownKey,
)
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.billing.v1.billing_pb2 import Change, Principal
from headrace_gateway.auth import KeyAuth, check_model_allowed
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal as Owner
from headrace_testing.clock import FakeClock
from headrace_testing.waiting import eventually


class Billing:
    """Knows one key; counts questions."""

    def __init__(self) -> None:
        self.principals: dict[bytes | str, Principal] = {
            hashlib.sha256(b"sk-hr-a").digest(): Principal(key_id="a")
        }
        self.num_questions = 0
        self.failure: HeadraceError | None = None
        self.is_away = False
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def resolve_key(self, key: bytes | str) -> Principal:
        self.num_questions += 1
        found = self.principals.get(key)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        if found is None:
            raise UnknownKey("not known")
        return found

    async def watch_changes(self) -> AsyncIterator[Change]:
        while True:
            yield await self.changes.get()


class Scene:
    """A key cache that follows billing."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.billing = clock, Billing()
        self.told: list[Change | None] = []
        metrics = GatewayMetrics(CollectorRegistry())
        self.auth = KeyAuth(self.billing, clock, metrics, self.told.append)
        self.task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        self.task = asyncio.create_task(self.auth.watch())
        await self.change()

    async def change(self, **fields: object) -> None:
        self.billing.changes.put_nowait(Change(**fields))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await eventually(lambda: self.auth.is_watching and self.billing.changes.empty())

    async def ask(self, key: bytes = b"sk-hr-a") -> Owner:
        return await self.auth.authenticate([(b"authorization", b"Bearer " + key)])


@pytest.fixture
async def scene(clock: FakeClock) -> AsyncIterator[Scene]:
    made = Scene(clock)
    yield made
    await cancel_and_wait(made.task)


async def test_a_key_is_asked_for_once_a_minute(scene: Scene) -> None:
    """Within its time an answer is reused, after it billing is asked again."""
    await scene.follow()
    for _ in range(3):
        assert (await scene.ask()).key_id == "a"
    assert scene.billing.num_questions == 1
    scene.clock.advance(61)
    await scene.ask()
    assert scene.billing.num_questions == 2


async def test_many_waiting_requests_ask_once(scene: Scene) -> None:
    """A burst of a new key is one question; one client's leaving does not fail the others."""
    scene.billing.may_answer.clear()
    asked = [asyncio.create_task(scene.ask()) for _ in range(5)]
    await asyncio.sleep(0.01)
    asked[0].cancel()
    await asyncio.sleep(0)
    scene.billing.may_answer.set()
    assert [(await task).key_id for task in asked[1:]] == ["a"] * 4
    assert scene.billing.num_questions == 1


async def test_unknown_keys_are_remembered_for_seconds(scene: Scene) -> None:
    """A client that repeats a wrong key does not reach billing each time."""
    for _ in range(3):
        with pytest.raises(UnknownKey):
            await scene.ask(b"sk-hr-wrong")
    assert scene.billing.num_questions == 1
    scene.clock.advance(6)
    with pytest.raises(UnknownKey):
        await scene.ask(b"sk-hr-wrong")
    assert scene.billing.num_questions == 2


async def test_a_change_drops_the_key_at_once(scene: Scene) -> None:
    """After a revocation is announced the next request asks, and a refusal counts."""
    await scene.follow()
    await scene.ask()
    scene.billing.principals.clear()
    await scene.change(key_ids=["other"])
    await scene.ask()
    await scene.change(key_ids=["a"])
    with pytest.raises(UnknownKey):
        await scene.ask()


async def test_a_new_key_ends_a_remembered_refusal(scene: Scene) -> None:
    """A key made after it was tried works at once."""
    await scene.follow()
    with pytest.raises(UnknownKey):
        await scene.ask(b"sk-hr-b")
    scene.billing.principals[hashlib.sha256(b"sk-hr-b").digest()] = Principal(key_id="b")
    await scene.change(key_ids=["b"])
    assert (await scene.ask(b"sk-hr-b")).key_id == "b"


async def test_an_answer_older_than_a_change_is_not_kept(scene: Scene) -> None:
    """A lookup under way while the key changes serves its request and nobody else's."""
    await scene.follow()
    scene.billing.may_answer.clear()
    asked = asyncio.create_task(scene.ask())
    await asyncio.sleep(0.01)
    await scene.change(key_ids=["a"])
    scene.billing.principals.clear()
    scene.billing.may_answer.set()
    await asked
    with pytest.raises(UnknownKey):
        await scene.ask()


async def test_without_the_watch_every_request_asks(scene: Scene) -> None:
    """What may have changed unheard is not trusted while billing answers."""
    await scene.ask()
    await scene.ask()
    assert scene.billing.num_questions == 2
    await scene.follow()
    await scene.ask()
    await scene.ask()
    assert scene.billing.num_questions == 3
    assert None in scene.told


async def test_silence_of_the_watch_ends_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without beats the watch fails, so that it is started anew."""
    monkeypatch.setattr("headrace_gateway.auth._WATCH_SILENCE_S", 0.05)
    await scene.follow()
    assert scene.task is not None
    with pytest.raises(TimeoutError):
        await scene.task
    assert not scene.auth.is_watching


async def test_an_own_pause_is_no_silence_of_the_watch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beats of billing lie unread; to doubt each key would be a burst of questions to it."""
    monkeypatch.setattr("headrace_gateway.auth._WATCH_SILENCE_S", 0.2)
    await scene.follow()
    asyncio.get_running_loop().call_later(0.3, scene.billing.changes.put_nowait, Change())
    time.sleep(0.4)  # noqa: ASYNC251 - that the loop stands still is the point
    await eventually(lambda: len(scene.told) == 3)
    assert scene.auth.is_watching


async def test_stale_answers_have_a_bound(scene: Scene) -> None:
    """Billing away: known keys go on for five minutes, unknown ones are told to come back."""
    await scene.follow()
    await scene.ask()
    scene.billing.failure = ReplicaLost("gone")
    scene.clock.advance(100)
    assert (await scene.ask()).key_id == "a"
    with pytest.raises(Unavailable):
        await scene.ask(b"sk-hr-new")
    scene.clock.advance(201)
    with pytest.raises(Unavailable):
        await scene.ask()


async def test_a_key_that_is_not_cached_waits_for_billing_to_start_again(scene: Scene) -> None:
    """It is asked again while nobody listens; one that is there and fails is not."""
    scene.billing.failure, scene.billing.is_away = ReplicaLost("away"), True
    asked = asyncio.create_task(scene.ask())
    await eventually(lambda: scene.billing.num_questions > 1)
    scene.billing.failure, scene.billing.is_away = None, False
    assert (await asked).key_id == "a"
    scene.billing.failure = ReplicaLost("silent")
    num_before = scene.billing.num_questions
    with pytest.raises(Unavailable):
        await scene.ask(b"sk-hr-b")
    assert scene.billing.num_questions == num_before + 1


async def test_billing_is_not_waited_for_without_end(scene: Scene) -> None:
    """Two seconds, then the key cannot be checked."""
    scene.billing.failure, scene.billing.is_away = ReplicaLost("away"), True
    asked = asyncio.create_task(scene.ask())
    await eventually(lambda: scene.billing.num_questions > 1)
    scene.clock.advance(2.0)
    with pytest.raises(Unavailable):
        await asked


async def test_expiry_is_checked_at_each_use(scene: Scene) -> None:
    """A cached key ends at its own time."""
    principal = next(iter(scene.billing.principals.values()))
    principal.expires_unix_s = int(scene.clock.unix_s()) + 10
    await scene.follow()
    await scene.ask()
    scene.clock.advance(10)
    with pytest.raises(KeyRevoked):
        await scene.ask()


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer   ")],
        [(b"authorization", b"Basic sk-hr-a")],
        [(b"authorization", b"Bearer " + b"x" * 600)],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"sk-hr-a"), (b"authorization", b"Basic sk-hr-a")],
        [(b"api-key", b"sk-hr-a")],
        [(b"authorization", b"Bearer sk-hr-a"), (b"authorization", b"Bearer sk-hr-b")],
        [(b"x-api-key", b"sk-hr-a"), (b"x-api-key", b"sk-hr-a")],
    ],
)
async def test_only_a_bearer_key_counts(scene: Scene, headers: list[tuple[bytes, bytes]]) -> None:
    """Everything else is refused without a question."""
    with pytest.raises(UnknownKey):
        await scene.auth.authenticate(headers)
    assert scene.billing.num_questions == 0


async def test_a_key_may_come_as_x_api_key(scene: Scene) -> None:
    """As Anthropic's SDKs send it; a bearer key wins over it."""
    await scene.auth.authenticate([(b"x-api-key", b"sk-hr-a")])
    bearer = (b"authorization", b"Bearer sk-hr-a")
    await scene.auth.authenticate([(b"x-api-key", b"sk-hr-wrong"), bearer])


def test_allowed_models() -> None:
    """An empty list allows all."""
    check_model_allowed(Owner(), "any")
    check_model_allowed(Owner(allowed_models=["m"]), "m")
    with pytest.raises(ModelNotAllowed):
        check_model_allowed(Owner(allowed_models=["m"]), "n")


@pytest.mark.parametrize("failure", [KeyRevoked("This account is suspended."), UnknownKey("x")])
async def test_whoever_has_a_key_is_told_what_became_of_it(
    scene: Scene, failure: UnknownKey
) -> None:
    """A suspended account is not told that its key is wrong; of a key that is none, only that."""
    told = "suspended" if isinstance(failure, KeyRevoked) else "Incorrect API key"
    scene.billing.failure = failure
    for _ in range(2):
        with pytest.raises(UnknownKey, match=told):
            await scene.ask()
    assert scene.billing.num_questions == 1
