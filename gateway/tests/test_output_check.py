"""Between workers and clients: text order, endings, and a guard that goes away."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import GuardUnavailable
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
        self.client = GuardClient(self.server.address, 1.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.server.kill()

    async def open(self, *, fail_open: bool = False, is_whole: bool = False) -> OutputCheck:
        principal = Principal(guard_fail_open=fail_open)
        return await open_output_check(self.client, principal, "r", self.metrics, is_whole=is_whole)


NOTHING = Release(0, "")


async def read(check: OutputCheck) -> list[Release]:
    async with asyncio.timeout(8):
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
    """Closed: what was held stays held. Open: it comes out, once, and the rest follows."""
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
