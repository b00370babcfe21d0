"""Between workers and clients: text order, endings, and a guard that goes away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import GuardUnavailable
from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_gateway.clients.guard import GuardClient
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.output_check import OutputCheck, Release, open_output_check
from headrace_gateway.principal import Principal
from headrace_testing.fake_guard import DESCRIPTOR, FakeGuard, Switches
from headrace_testing.gateway_fleet import FakeServer


class Scene:
    """An output check against a guard behind a real server."""

    def __init__(self, guard: FakeGuard) -> None:
        self.server = FakeServer(DESCRIPTOR, guard)
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.client: GuardClient

    async def __aenter__(self) -> Scene:
        await self.server.start()
        self.client = GuardClient(self.server.address, 1.0, 1.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.server.kill()

    async def open(self, *, fail_open: bool = False, is_whole: bool = False) -> OutputCheck:
        principal = Principal(guard_fail_open=fail_open)
        return await open_output_check(self.client, principal, "r", self.metrics, is_whole=is_whole)


NOTHING = Release(0, "")


async def read(check: OutputCheck) -> list[Release]:
    async with asyncio.timeout(30):
        releases = []
        while (release := await check.next_release()) is not None:
            releases.append(release)
        return releases


def joined(releases: list[Release], choice_idx: int = 0) -> str:
    return "".join(it.text for it in releases if it.choice_idx == choice_idx)


async def test_clean_text_comes_back_whole_and_in_order() -> None:
    """Two choices interleaved: each as it was, each ends once."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open()
        for piece in ("ax", "bxy", "c"):
            check.push(0, piece, is_last=False)
            check.push(1, piece.upper(), is_last=piece == "c")
        check.push(0, "", is_last=True)
        check.finish()
        releases = await read(check)
        check.close()
    assert (joined(releases, 0), joined(releases, 1)) == ("axbxyc", "AXBXYC")
    assert sorted(it.choice_idx for it in releases if it.is_last) == [0, 1]


async def test_a_whole_answer_is_judged_in_pieces() -> None:
    """Single tokens gather; what is forbidden across a border is found; no text is left behind."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open(is_whole=True)
        for _ in range(600):
            check.push(0, "a ", is_last=False)
            check.push(1, "b", is_last=False)
        check.push(0, "end", is_last=True)
        check.push(1, "x", is_last=False)
        check.push(1, "yz", is_last=True)
        check.finish()
        releases = await read(check)
        check.close()
    assert joined(releases, 0) == "a " * 600 + "end"
    assert joined(releases, 1) == "b" * 600
    assert [it.choice_idx for it in releases if it.is_blocked] == [1]
    assert len([it for it in releases if it.text]) < 8


async def test_a_whole_answer_that_breaks_off_loses_no_text() -> None:
    """What was gathered when no more came is judged too, and given out if the guard is lost."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open(fail_open=True, is_whole=True)
        check.push(0, "some", is_last=False)
        await scene.server.kill()
        first = await check.next_release()
        check.push(0, " more", is_last=True)
        check.finish()
        rest = await read(check)
        check.close()
    assert first is not None
    assert first.text + joined(rest) == "some more"


async def test_a_blocked_choice_takes_no_more_text() -> None:
    """What comes after the block is not even sent to the guard."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open()
        check.push(0, "a xyz", is_last=False)
        first = await check.next_release()
        assert first is not None
        assert (first.text, first.is_blocked) == ("a ", True)
        check.push(0, " more", is_last=True)
        check.finish()
        assert await read(check) == []
        check.close()


@pytest.mark.parametrize("fail_open", [True, False])
async def test_guard_that_cannot_be_reached(fail_open: bool) -> None:
    """Closed: refused at once. Open: text passes as it comes."""
    async with Scene(FakeGuard()) as scene:
        await scene.server.kill()
        if not fail_open:
            with pytest.raises(GuardUnavailable):
                await scene.open()
            return
        check = await scene.open(fail_open=True)
        check.push(0, "a", is_last=False)
        check.push(0, "b", is_last=True)
        check.finish()
        assert joined(await read(check)) == "ab"
        check.close()


@pytest.mark.parametrize("fail_open", [True, False])
async def test_guard_killed_with_text_held(fail_open: bool) -> None:
    """Closed: what was held stays held if no other comes. Open: it comes out once, and the rest."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open(fail_open=fail_open)
        check.push(0, "a xy", is_last=False)
        assert joined([await check.next_release() or NOTHING]) == "a "
        await scene.server.kill()
        if not fail_open:
            with pytest.raises(GuardUnavailable):
                await check.next_release()
            check.close()
            return
        assert joined([await check.next_release() or NOTHING]) == "xy"
        check.push(0, "!", is_last=True)
        check.finish()
        assert joined(await read(check)) == "!"
        check.close()


async def test_a_guard_that_never_answers_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last text it has some seconds; then the policy for no verdict holds."""
    monkeypatch.setattr("headrace_gateway.output_check._LAST_ANSWER_S", 0.1)
    async with Scene(FakeGuard(switches=Switches(hang=True))) as scene:
        check = await scene.open()
        check.push(0, "a", is_last=True)
        check.finish()
        with pytest.raises(GuardUnavailable):
            await read(check)
        check.close()


@pytest.mark.parametrize("fail_open", [True, False])
async def test_no_verdict_is_not_clean(fail_open: bool) -> None:
    """An answer that could not be judged follows the key's policy, like a lost guard."""
    async with Scene(FakeGuard(switches=Switches(cannot_look=True))) as scene:
        check = await scene.open(fail_open=fail_open)
        check.push(0, "a", is_last=False)
        check.push(0, "b", is_last=True)
        check.finish()
        if fail_open:
            releases = await read(check)
            assert joined(releases) == "ab"
            assert [it.is_last for it in releases][-1]
        else:
            with pytest.raises(GuardUnavailable):
                await read(check)
        check.close()


async def test_another_guard_takes_over_what_was_held() -> None:
    """A guard that is back in time costs nothing: each character comes out once, judged."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open()
        check.push(0, "a xy", is_last=False)
        check.push(1, "b", is_last=True)
        first = [await check.next_release() or NOTHING for _ in range(2)]
        reading = asyncio.create_task(read(check))
        await scene.server.kill()
        check.push(0, "w xy", is_last=False)
        await asyncio.sleep(0.2)
        await scene.server.start()
        await asyncio.sleep(0.2)
        check.push(0, "!", is_last=True)
        check.finish()
        releases = first + await reading
        check.close()
    assert (joined(releases), joined(releases, 1)) == ("a xyw xy!", "b")
    assert sorted(it.choice_idx for it in releases if it.is_last) == [0, 1]
    assert (check.is_lost, check.is_unguarded) == (True, False)


async def test_what_one_guard_held_another_blocks() -> None:
    """A word that begins before the loss and ends behind it; and one in a whole answer."""
    for is_whole in (False, True):
        async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
            check = await scene.open(is_whole=is_whole)
            check.push(0, "a xy" + "-" * 600 + "xy", is_last=False)
            first = await check.next_release() or NOTHING
            await scene.server.kill()
            await scene.server.start()
            check.push(0, "z and more", is_last=True)
            check.finish()
            releases = [first, *await read(check)]
            check.close()
        assert joined(releases) == "a xy" + "-" * 600
        assert [it.is_blocked for it in releases].count(True) == 1


async def test_a_guard_that_starts_again_is_waited_for_before_an_answer() -> None:
    """Opening waits within its bound."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        await scene.server.kill()
        opening = asyncio.create_task(scene.open())
        await asyncio.sleep(0.3)
        assert not opening.done()
        await scene.server.start()
        check = await opening
        check.push(0, "xyz", is_last=True)
        check.finish()
        assert [it.is_blocked for it in await read(check)] == [True]
        check.close()


class DyingGuard(FakeGuard):
    """Ends at a text that no guard survives, as a crash would, and is started again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scene: Scene | None = None
        self.num_deaths = 0
        self.dying: set[asyncio.Task[None]] = set()

    async def CheckOutput(  # noqa: N802 - contract name
        self, requests: AsyncIterator[pb.CheckOutputRequest], call: Call
    ) -> AsyncIterator[pb.CheckOutputResponse]:
        async def until_poison() -> AsyncIterator[pb.CheckOutputRequest]:
            async for request in requests:
                if "poison" in request.text.text:
                    self.num_deaths += 1
                    self.dying.add(asyncio.create_task(self._die()))
                    await asyncio.Event().wait()
                yield request

        async for answer in super().CheckOutput(until_poison(), call):
            yield answer

    async def _die(self) -> None:
        assert self.scene is not None
        await self.scene.server.kill()
        await self.scene.server.start()


async def test_a_text_that_ends_guards_ends_two_at_most() -> None:
    """A second one is lost where the first was: no third is asked."""
    guard = DyingGuard()
    async with Scene(guard) as scene:
        guard.scene = scene
        check = await scene.open()
        check.push(0, "fine", is_last=False)
        check.push(0, " poison", is_last=True)
        check.finish()
        with pytest.raises(GuardUnavailable):
            await read(check)
        check.close()
        await asyncio.gather(*guard.dying)
    assert guard.num_deaths == 2


async def test_a_guard_may_be_lost_again_and_again() -> None:
    """As long as it comes further each time, or nothing waits for it."""
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open()
        reading = asyncio.create_task(read(check))
        for idx in range(4):
            check.push(0, f"{idx}", is_last=False)
            await asyncio.sleep(0.05)
            for _ in range(2):
                await scene.server.kill()
                await scene.server.start()
                await asyncio.sleep(0.15)
        check.push(0, ".", is_last=True)
        check.finish()
        assert joined(await reading) == "0123."
        check.close()


async def test_a_long_answer_is_not_kept_for_another_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is bounded: what came out of it is forgotten, and then a lost guard ends it."""
    monkeypatch.setattr("headrace_gateway.output_check._KEPT_BYTES", 100)
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open()
        for _ in range(30):
            check.push(0, "four ", is_last=False)
            await check.next_release()
        kept = dict(check._given)[0]
        assert len(kept.text) <= 100
        assert (kept.start + len(kept.text), kept.released_chars) == (150, 150)
        await scene.server.kill()
        await scene.server.start()
        with pytest.raises(GuardUnavailable):
            await read(check)
        check.close()


@pytest.mark.parametrize("seed", range(6))
async def test_lost_guards_change_nothing(seed: int) -> None:
    """Whenever and however often one is killed: text, order and ends are those without a loss."""
    drawn = random.Random(seed)
    pieces = [(drawn.randrange(3), drawn.choice(["a", "x", "xy", "z ", "é水 "])) for _ in range(60)]
    expected = {idx: "".join(it for at, it in pieces if at == idx) for idx in range(3)}
    losses = set(drawn.sample(range(60), 3))
    async with Scene(FakeGuard(blocklist=["xyz"])) as scene:
        check = await scene.open(is_whole=bool(seed % 2))
        reading = asyncio.create_task(read(check))
        for at, (choice_idx, text) in enumerate(pieces):
            check.push(choice_idx, text, is_last=False)
            if at in losses:
                await scene.server.kill()
                await scene.server.start()
                await asyncio.sleep(drawn.random() * 0.3)
        for choice_idx in range(3):
            check.push(choice_idx, "", is_last=True)
        check.finish()
        releases = await reading
        check.close()
    for choice_idx, whole in expected.items():
        before, found, _ = whole.partition("xyz")
        assert joined(releases, choice_idx) == before
        ends = [it for it in releases if it.choice_idx == choice_idx and it.is_last]
        assert [it.is_blocked for it in ends] == [bool(found)]
