"""Guards that are killed while answers are judged: real processes behind a real gateway.

A key whose policy is closed gets every answer whole, and nothing that was not judged, as long as a
guard is there in time: another one, or the same started again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from headrace_common.errors import ReplicaLost
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.reconcile import leak_in
from headrace_testing.fake_worker import saying
from headrace_testing.gateway_answers import CHAT, finish_reasons, streamed_text
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

_FIND = method_ref(
    pb.DESCRIPTOR.services_by_name["GuardAdmin"],
    "FindAudit",
    pb.FindAuditRequest,
    pb.FindAuditResponse,
)
_NUM_STREAMS = 24
# "can" is held back until what follows is there.
_SAID = "you can see " * 12
_POLICIES = """
version = "1"
[policies.default]
fails_open = false
blocklist = ["canary"]
owner_exempt = []
input = {}
output = { blocklist = "block", "pii.*" = "redact", "secret.*" = "flag" }
[policies.open]
fails_open = true
blocklist = ["canary"]
owner_exempt = []
input = {}
output = { blocklist = "block", "pii.*" = "redact", "secret.*" = "flag" }
"""


class Guards:
    """Guards in processes of their own: one, or several behind an address as of a balancer."""

    def __init__(self, folder: Path, count: int) -> None:
        policies = folder / "policies.toml"
        policies.write_text(_POLICIES)
        self.running: list[LocalServer] = []
        for idx in range(count):
            port, place = free_port(), folder / f"guard-{idx}"
            place.mkdir()
            settings = {
                "LISTEN": f"127.0.0.1:{port}",
                "METRICS_LISTEN": "127.0.0.1:0",
                "POLICY_FILE": policies,
                "AUDIT_DIR": place,
                "DRAIN_GRACE_S": 1.0,
            }
            command = ["env", *(f"HEADRACE_GUARD_{name}={it}" for name, it in settings.items())]
            command += [sys.executable, "-m", "headrace_guard"]
            self.running.append(LocalServer(command, port, place))
        self.address = f"127.0.0.1:{self.running[0].port}"
        self._balancer: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for guard in self.running:
            await asyncio.to_thread(guard.start)
        if len(self.running) > 1:
            self._balancer = await asyncio.start_server(self._link, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._balancer.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._balancer is not None:
            self._balancer.close()
        for guard in self.running:
            guard.kill()
        await asyncio.gather(*self._links)

    async def restart(self) -> None:
        """Kill the first and start it again at once, as a supervisor does."""
        await asyncio.to_thread(self.running[0].kill)
        await asyncio.to_thread(self.running[0].start)

    async def replace(self) -> None:
        """Tell the first to leave, and start it again once it has."""
        await asyncio.to_thread(self.running[0].leave, 20)
        await asyncio.to_thread(self.running[0].start)

    async def records(self, request_id: str) -> list[pb.AuditRecord]:
        """Return all audit records of a request, of all guards."""
        found: list[pb.AuditRecord] = []
        for guard in self.running:
            client = SessionClient(f"127.0.0.1:{guard.port}")
            with suppress(ReplicaLost):
                request = pb.FindAuditRequest(request_id=request_id)
                found += (await client.unary(_FIND, request, timeout_s=5)).records
            await client.close()
        return found

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection to the first guard that listens."""
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        for guard in self.running:
            with suppress(OSError):
                back, forth = await asyncio.open_connection("127.0.0.1", guard.port)
                await asyncio.gather(_pass(reader, forth), _pass(back, writer))
                break
        writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def scene(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[GatewayFleet, Guards]]:
    """A gateway in front of so many guards."""
    guards = Guards(tmp_path, request.param)
    fleet = GatewayFleet(tmp_path)
    try:
        await guards.start()
        # A busy machine starts no guard within the usual four seconds.
        fleet.settings = {"guard_address": guards.address, "guard_wait_s": 30.0}
        await fleet.start()
        yield fleet, guards
    finally:
        await fleet.close()
        await guards.stop()


async def answers(
    fleet: GatewayFleet, key: str, *, stream: bool, count: int = _NUM_STREAMS
) -> list[httpx.Response]:
    """Ask for many answers at once."""
    body = chat_body(stream=stream)
    async with fleet.http(key) as client:
        return await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(count)))


def said(answer: httpx.Response, *, stream: bool) -> tuple[str, list[str]]:
    """Return what an answer says and how its choices ended."""
    if stream:
        return streamed_text(answer), finish_reasons(answer)
    choices = answer.json().get("choices", [])
    return "".join(it["message"]["content"] for it in choices), [
        it["finish_reason"] for it in choices
    ]


@pytest.mark.parametrize(
    ("scene", "policy", "stream"),
    [
        (1, "default", True),
        (1, "default", False),
        (2, "default", True),
        (1, "open", True),
    ],
    indirect=["scene"],
)
async def test_a_killed_guard_costs_nobody_an_answer(
    scene: tuple[GatewayFleet, Guards], policy: str, stream: bool
) -> None:
    """Every answer is whole, once; a closed key's was judged, all of it, and the audit says so."""
    fleet, guards = scene
    fleet.worker.script = saying(_SAID + "jo@mail.example.org now")
    fleet.worker.switches.delay_per_token_s = 0.01
    key, _ = fleet.new_key(guard_policy=policy, guard_fail_open=policy == "open")
    asking = asyncio.create_task(answers(fleet, key, stream=stream))
    await eventually(lambda: len(fleet.worker.running) == _NUM_STREAMS)
    await asyncio.sleep(0.5)
    await guards.restart()
    got = await asking
    ends = [said(answer, stream=stream) for answer in got]
    if policy == "open":
        assert {text[: len(_SAID)] for text, _ in ends} == {_SAID}
    else:
        assert {text for text, _ in ends} == {_SAID + "[redacted pii.email] now"}
    assert [reasons for _, reasons in ends] == [["stop"]] * _NUM_STREAMS
    await fleet.settled()
    if policy == "open":
        return
    for answer in got:
        request_id = answer.headers["x-request-id"]
        whole: pb.AuditRecord = await eventually(_Looking(guards, request_id))
        assert [it.category for it in whole.findings] == ["pii.email"]
        assert (whole.released_chars, whole.released_text_chars) == (
            len(_SAID + "jo@mail.example.org now"),
            len(_SAID + "[redacted pii.email] now"),
        )


class _Looking:
    """Looks for an answer's record, once all of it is told."""

    def __init__(self, guards: Guards, request_id: str) -> None:
        self._guards, self._request_id = guards, request_id

    async def __call__(self) -> pb.AuditRecord:
        records = await self._guards.records(self._request_id)
        outputs = [it for it in records if it.kind == pb.AUDIT_KIND_OUTPUT]
        assert outputs
        assert any(it.kind == pb.AUDIT_KIND_SENT for it in records)
        assert leak_in(records) is None
        return outputs[-1]


@pytest.mark.parametrize("scene", [2], indirect=True)
async def test_an_answer_that_is_complete_is_judged_by_another(
    scene: tuple[GatewayFleet, Guards],
) -> None:
    """It was given whole to a guard that stands still and then dies: the other gets it at once."""
    fleet, guards = scene
    fleet.worker.script = saying(_SAID + "jo@mail.example.org now")
    fleet.worker.switches.delay_per_token_s = 0.005
    key, _ = fleet.new_key(guard_policy="default")
    asking = asyncio.create_task(answers(fleet, key, stream=True))
    await eventually(lambda: len(fleet.worker.running) == _NUM_STREAMS)
    await asyncio.sleep(0.2)
    guards.running[0].freeze()
    await eventually(lambda: not fleet.worker.running)
    guards.running[0].kill()
    ends = [said(answer, stream=True) for answer in await asking]
    assert ends == [(_SAID + "[redacted pii.email] now", ["stop"])] * _NUM_STREAMS
    await fleet.settled()


@pytest.mark.parametrize("scene", [1], indirect=True)
async def test_a_guard_that_leaves_costs_nobody_an_answer(
    scene: tuple[GatewayFleet, Guards],
) -> None:
    """Neither those whose answers it judges then, nor those who come while it leaves."""
    fleet, guards = scene
    fleet.worker.script = saying(_SAID)
    fleet.worker.switches.delay_per_token_s = 0.03
    key, _ = fleet.new_key(guard_policy="default")
    asking = [asyncio.create_task(answers(fleet, key, stream=True, count=6))]
    await eventually(lambda: len(fleet.worker.running) == 6)
    replacing = asyncio.create_task(guards.replace())
    for _ in range(4):
        await asyncio.sleep(0.2)
        asking.append(asyncio.create_task(answers(fleet, key, stream=True, count=3)))
    await replacing
    for got in await asyncio.gather(*asking):
        assert [said(answer, stream=True) for answer in got] == [(_SAID, ["stop"])] * len(got)
    await fleet.settled()


@pytest.mark.parametrize("scene", [1], indirect=True)
async def test_a_word_that_is_blocked_stays_blocked(
    scene: tuple[GatewayFleet, Guards],
) -> None:
    """A guard killed in the middle of it and before it lets none of it out."""
    fleet, guards = scene
    fleet.worker.script = saying(_SAID + "a canary and more " * 3)
    fleet.worker.switches.delay_per_token_s = 0.01
    key, _ = fleet.new_key(guard_policy="default")
    asking = asyncio.create_task(answers(fleet, key, stream=True))
    await eventually(lambda: len(fleet.worker.running) == _NUM_STREAMS)
    await asyncio.sleep(len(_SAID + "a can") * 0.01)
    await guards.restart()
    ends = [said(answer, stream=True) for answer in await asking]
    assert ends == [(_SAID + "a ", ["content_filter"])] * _NUM_STREAMS
    await fleet.settled()


@pytest.mark.parametrize("scene", [1], indirect=True)
async def test_without_a_guard_in_time_nothing_goes_out(
    scene: tuple[GatewayFleet, Guards],
) -> None:
    """What was not judged never does, and nobody waits longer than for a guard."""
    fleet, guards = scene
    fleet.worker.script = saying(_SAID)
    fleet.worker.switches.delay_per_token_s = 0.02
    fleet.settings["guard_wait_s"] = 1.0
    await fleet.restart_gateway()
    key, _ = fleet.new_key(guard_policy="default")
    asking = asyncio.create_task(answers(fleet, key, stream=True))
    await eventually(lambda: len(fleet.worker.running) == _NUM_STREAMS)
    await asyncio.sleep(0.3)
    guards.running[0].kill()
    async with asyncio.timeout(30):
        got = await asking
    assert all("guard_unavailable" in answer.text for answer in got)
    assert all(_SAID.startswith(streamed_text(answer)) for answer in got)
    await fleet.settled()
