"""``headrace guard`` and the check of a key's policy, against a real guard."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_common.rpc import call_unary, method_ref, open_channel
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.server import DESCRIPTOR, GuardApp
from headrace_guard.settings import GuardSettings
from headrace_launcher.cli import run
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer

CHECK_INPUT = method_ref(DESCRIPTOR, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
Headrace = Callable[..., tuple[int, str, str]]
POLICY = """
fails_open = false
blocklist = ["heron"]
owner_exempt = []
[input]
blocklist = "block"
[output]
blocklist = "block"
"""


class Services:
    """A guard and a billing on a thread of their own, so that commands can run their loops."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.guard = self.billing = ""
        self._loop = asyncio.new_event_loop()
        self._up, self._done = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Services":
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()
        self._loop.close()

    def judge(self, text: str, request_id: str = "r1") -> pb.Verdict:
        """Ask the guard about a text."""
        return asyncio.run_coroutine_threadsafe(self._judge(text, request_id), self._loop).result(9)

    async def _judge(self, text: str, request_id: str) -> pb.Verdict:
        request = pb.CheckInputRequest(
            request_id=request_id,
            tenant_id="t",
            key_id="k",
            policy=pb.PolicyRef(policy="mine"),
            parts=[pb.TextPart(path="messages[0].content", text=text, trust=pb.TRUST_USER)],
        )
        async with open_channel(self.guard) as channel:
            return (await call_unary(channel, CHECK_INPUT, request, timeout_s=5)).verdict

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        settings = GuardSettings(policy_dir=self._folder / "policies", drain_grace_s=0)
        app = GuardApp(settings)
        await app.start()
        async with FakeBillingServer(FakeBilling()) as server:
            self.guard, self.billing = f"127.0.0.1:{app.port}", server.address
            self._up.set()
            await self._done.wait()
        await app.stop()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with Services(tmp_path) as made:
        yield made


@pytest.fixture
def headrace(
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Headrace:
    monkeypatch.setenv("HEADRACE_LAUNCHER_GUARD_ADDRESS", services.guard)
    monkeypatch.setenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", services.billing)
    monkeypatch.setenv("HEADRACE_LAUNCHER_STATE_DIR", str(tmp_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


def test_a_policy_is_put_used_shown_and_dropped(
    services: Services, headrace: Headrace, tmp_path: Path
) -> None:
    """Live, without a restart."""
    assert services.judge("a heron").action == pb.ACTION_UNAVAILABLE
    file = tmp_path / "mine.toml"
    file.write_text(POLICY)
    assert headrace("guard", "put", "mine", str(file))[0] == 0
    assert services.judge("a heron").action == pb.ACTION_BLOCK
    shown = headrace("guard", "policy", "mine")[1]
    file.write_text(shown.replace("heron", "stork"))
    assert headrace("guard", "put", "mine", str(file))[0] == 0
    assert services.judge("a heron").action == pb.ACTION_ALLOW
    listed = json.loads(headrace("guard", "policies", "--json")[1])["policies"]
    assert {one["name"] for one in listed} == {"default", "public", "strict", "off", "mine"}
    assert [one["is_put"] for one in listed if one["name"] == "mine"] == [True]
    assert "mine" not in headrace("guard", "delete", "mine")[1]
    assert "strict" in headrace("guard", "reload")[1]


def test_mistakes_are_told(headrace: Headrace, tmp_path: Path) -> None:
    """Each one, and the exit code says so."""
    file = tmp_path / "mine.toml"
    file.write_text(POLICY.replace('"block"', '"deny"'))
    code, _, told = headrace("guard", "put", "mine", str(file))
    assert code != 0
    assert "policies.mine.input.blocklist: one of off" in told
    assert headrace("guard", "put", "mine", str(tmp_path / "none.toml"))[0] != 0
    assert headrace("guard", "policy", "none")[0] != 0
    file.write_text(POLICY)
    code, _, told = headrace("guard", "put", "mine", str(file), "--if-version", "old")
    assert code != 0
    assert "Another version" in told


def test_the_audit_of_a_request_is_shown(
    services: Services, headrace: Headrace, tmp_path: Path
) -> None:
    """Who, what, where; never the text."""
    file = tmp_path / "mine.toml"
    file.write_text(POLICY)
    headrace("guard", "put", "mine", str(file))
    services.judge("a heron", "req_7")
    code, text, _ = headrace("guard", "audit", "req_7")
    assert code == 0
    assert "input: hit, block" in text
    assert "blocklist 1.00 in messages[0].content[2:7]: block" in text
    assert "heron" not in text
    (record,) = json.loads(headrace("guard", "audit", "req_7", "--json")[1])["records"]
    assert (record["request_id"], record["scanned_chars"]) == ("req_7", 7)
    assert headrace("guard", "verify")[1].startswith("right: 1 records")
    told = json.loads(headrace("guard", "verify", "--json")[1])
    assert told == {"ok": True, "num_records": 1, "problems": []}
    assert headrace("guard", "audit", "req_8")[0] == 1


def test_a_key_cannot_name_a_policy_that_is_not_there(headrace: Headrace) -> None:
    """It would be refused with every request."""
    words = ("keys", "create", "--tenant", "t", "--name", "n", "--guard-policy")
    code, _, told = headrace(*words, "stirct")
    assert code != 0
    assert "no policy 'stirct'; it has default, off, public, strict" in told
    assert headrace(*words, "strict")[0] == 0


def test_without_a_fleet_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And what to do."""
    monkeypatch.setenv("HEADRACE_LAUNCHER_STATE_DIR", str(tmp_path))
    assert run(("guard", "policies")) != 0
    assert "headrace up" in capsys.readouterr().err
