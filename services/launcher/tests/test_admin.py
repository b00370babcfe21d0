"""Keys, usage and ledger by the command line, against billing's contract."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_launcher.cli import run
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer

Headrace = Callable[..., tuple[int, str]]


class OpinionatedBilling(FakeBilling):
    """Billing whose books can be wrong."""

    verdict: billing_pb2.VerifyResponse | None = None

    async def Verify(self, request, call):  # noqa: N802 - contract name
        return self.verdict or await super().Verify(request, call)


class BillingThread:
    """The fake on a thread of its own, so that commands can run their own event loops."""

    def __init__(self) -> None:
        self.fake = OpinionatedBilling()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._up, self._done = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "BillingThread":
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with FakeBillingServer(self.fake) as server:
            self.address = server.address
            self._up.set()
            await self._done.wait()


@pytest.fixture
def billing() -> Iterator[BillingThread]:
    with BillingThread() as thread:
        yield thread


@pytest.fixture
def headrace(billing, monkeypatch, capsys, tmp_path) -> Headrace:
    monkeypatch.setenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", billing.address)
    monkeypatch.setenv("HEADRACE_LAUNCHER_STATE_DIR", str(tmp_path))

    def call(*arguments: str) -> tuple[int, str]:
        code = run(arguments)
        return code, capsys.readouterr().out

    return call


def closed_event(key_id: str, request_id: str, ending: int) -> usage_pb2.UsageEvent:
    return usage_pb2.UsageEvent(
        kind=usage_pb2.UsageEvent.KIND_CLOSED,
        request_id=request_id,
        tenant_id="acme",
        key_id=key_id,
        model="smollm2-135m-instruct",
        price_version=1,
        occurred_unix_us=1_700_000_000_000_000,
        usage=TokenUsage(
            prompt_tokens=100, cached_gpu_tokens=48, cached_cpu_tokens=16, output_tokens=5
        ),
        ending=ending,
    )


def test_creates_a_key_with_limits(headrace: Headrace, billing: BillingThread) -> None:
    """Prints exactly the key and its id; every option arrives in its place."""
    code, out = headrace(
        "keys", "create", "--tenant", "acme", "--name", "ci", "--requests-per-minute", "3",
        "--tokens-per-minute", "1000", "--max-concurrent", "2", "--budget-usd", "0.5",
        "--models", "a,b", "--guard-block", "foo, bar", "--json",
    )  # fmt: skip
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"api_key", "key_id"}
    key = billing.fake.keys[answer["key_id"]]
    assert answer["api_key"].startswith(key.prefix)
    assert (key.tenant_id, key.name) == ("acme", "ci")
    assert key.limits.requests_per_minute == 3
    assert key.limits.tokens_per_minute == 1000
    assert key.limits.max_concurrent == 2
    assert key.limits.month_budget_nano_usd == 500_000_000
    assert list(key.allowed_models) == ["a", "b"]
    assert list(key.guard_blocklist) == ["foo", "bar"]


def test_a_key_without_a_budget_has_none_and_one_with_zero_may_spend_nothing(
    headrace: Headrace, billing: BillingThread
) -> None:
    """Absent and zero are different things."""
    made = [
        json.loads(headrace("keys", "create", "--tenant", "t", "--name", "n", "--json", *more)[1])
        for more in ([], ["--budget-usd", "0"])
    ]
    free, broke = (billing.fake.keys[key["key_id"]].limits for key in made)
    assert not free.HasField("month_budget_nano_usd")
    assert broke.HasField("month_budget_nano_usd")
    assert broke.month_budget_nano_usd == 0


@pytest.mark.parametrize(
    "option",
    [("--budget-usd", "-1"), ("--budget-usd", "x"), ("--requests-per-minute", "0")],
)
def test_refuses_limits_that_make_no_sense(headrace: Headrace, option: tuple[str, str]) -> None:
    """Exit code 2, as for every wrong command line."""
    with pytest.raises(SystemExit) as caught:
        headrace("keys", "create", "--tenant", "t", "--name", "n", *option)
    assert caught.value.code == 2


def test_revokes_and_lists_keys(headrace: Headrace, billing: BillingThread) -> None:
    """A revoked key is listed as such."""
    _, key = billing.fake.create_key("acme")
    billing.fake.create_key("other")
    code, out = headrace("keys", "revoke", key.key_id, "--json")
    assert code == 0
    assert json.loads(out)["revoked"] is not None
    assert headrace("keys", "revoke", key.key_id) == (0, f"revoked {key.key_id} (acme/)\n")
    code, out = headrace("keys", "list", "--tenant", "acme", "--json")
    assert code == 0
    [listed] = json.loads(out)["keys"]
    assert listed["key_id"] == key.key_id
    assert listed["revoked"] is not None
    assert "revoked" in headrace("keys", "list")[1]


def test_revoking_an_unknown_key_fails_with_words(headrace: Headrace, capsys: Any) -> None:
    """Exit code 1."""
    code = run(["keys", "revoke", "nope"])
    assert code == 1
    assert "nope" in capsys.readouterr().err


def test_usage_of_an_unknown_key_is_an_error_and_of_an_unused_one_is_empty(
    headrace: Headrace, billing: BillingThread, capsys: Any
) -> None:
    """A typo must not read as "this key used nothing"."""
    assert run(["usage", "--key", "nope"]) == 1
    assert "nope" in capsys.readouterr().err
    _, key = billing.fake.create_key("acme")
    assert "0 requests" in headrace("usage", "--key", key.key_id)[1]


def test_shows_usage_per_request(headrace: Headrace, billing: BillingThread) -> None:
    """Every ending has a word; cached tokens of all tiers are added up; amounts are exact."""
    _, key = billing.fake.create_key("acme")
    endings = {
        usage_pb2.ENDING_COMPLETED: "completed",
        usage_pb2.ENDING_CLIENT_GONE: "cancelled",
        usage_pb2.ENDING_OUTPUT_BLOCKED: "blocked",
        usage_pb2.ENDING_FAILED: "failed",
        usage_pb2.ENDING_SWEPT: "swept",
    }
    for number, ending in enumerate(endings):
        billing.fake.book(closed_event(key.key_id, f"req_{number}", ending))
    opened = closed_event(key.key_id, "req_9", 0)
    opened.kind = usage_pb2.UsageEvent.KIND_OPENED
    billing.fake.book(opened)
    code, out = headrace("usage", "--key", key.key_id, "--json")
    assert code == 0
    usage = json.loads(out)
    statuses = [record["status"] for record in usage["records"]]
    assert statuses == [*endings.values(), "open"]
    first = usage["records"][0]
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (
        100,
        64,
        5,
    )
    assert first["amount_nano_usd"] == 36 * 20 + 64 * 2 + 5 * 60
    assert first["amount_usd"] == "0.000001148"
    assert usage["total_nano_usd"] == sum(r["amount_nano_usd"] for r in usage["records"])
    assert "6 requests" in headrace("usage", "--key", key.key_id)[1]


def test_fetches_usage_page_by_page(
    headrace: Headrace, billing: BillingThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is lost or doubled at a page's border."""
    monkeypatch.setattr("headrace_launcher.billing_client._PAGE_RECORDS", 3)
    _, key = billing.fake.create_key("acme")
    for number in range(7):
        event = closed_event(key.key_id, f"req_{number}", usage_pb2.ENDING_COMPLETED)
        billing.fake.book(event)
    usage = json.loads(headrace("usage", "--key", key.key_id, "--json")[1])
    assert [r["request_id"] for r in usage["records"]] == [f"req_{n}" for n in range(7)]


def test_ledger_verify_says_by_its_exit_code_whether_the_books_are_right(
    headrace: Headrace, billing: BillingThread
) -> None:
    """0 for right, 1 for wrong, with the problems printed."""
    assert headrace("ledger", "verify") == (
        0,
        "right: 0 events, 0 entries, 0 open, 0 dead letters, postings sum to 0 nano-USD\n",
    )
    billing.fake.verdict = billing_pb2.VerifyResponse(ok=False, problems=["req_1 is booked twice"])
    code, out = headrace("ledger", "verify")
    assert code == 1
    assert "req_1 is booked twice" in out
    code, out = headrace("ledger", "verify", "--json")
    assert code == 1
    assert json.loads(out)["problems"] == ["req_1 is booked twice"]


def test_without_a_fleet_the_commands_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Exit code 3 and a sentence with the state directory and `headrace up`."""
    monkeypatch.delenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", raising=False)
    for command in (["keys", "list"], ["usage", "--key", "k"], ["ledger", "verify"]):
        assert run([*command, "--state-dir", str(tmp_path)]) == 3
        message = capsys.readouterr().err
        assert str(tmp_path) in message
        assert "headrace up" in message


def test_billing_that_does_not_answer_is_an_error_with_words(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Exit code 1, the address in the message."""
    monkeypatch.setattr("headrace_launcher.billing_client._TIMEOUT_S", 0.5)
    monkeypatch.setenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", "127.0.0.1:1")
    assert run(["keys", "list", "--state-dir", str(tmp_path)]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["keys", "tenants"])
def test_billing_that_is_silent_is_given_up_soon(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Only what goes through all events has ten minutes."""

    async def hang(self: FakeBilling, _request: object, _call: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(OpinionatedBilling, "ListKeys", hang, raising=False)
    monkeypatch.setattr(OpinionatedBilling, "ListTenants", hang, raising=False)
    monkeypatch.setattr("headrace_launcher.billing_client._TIMEOUT_S", 0.5)
    with BillingThread() as billing:
        monkeypatch.setenv("HEADRACE_LAUNCHER_BILLING_ADDRESS", billing.address)
        began_s = time.monotonic()
        assert run([command, "list", "--state-dir", str(tmp_path)]) == 1
        assert time.monotonic() - began_s < 10
    assert billing.address in capsys.readouterr().err


def test_what_a_tenant_used_is_summed_for_people(
    headrace: Headrace, billing: BillingThread
) -> None:
    """By what was asked for, a day as a date, all classes of tokens in one price."""
    for number in range(2):
        billing.fake.book(closed_event("key_x", f"req_{number}", usage_pb2.ENDING_COMPLETED))
    code, out = headrace("usage", "--tenant", "acme", "--by", "day,model,tier")
    assert code == 0
    names, line = (row.split() for row in out.splitlines())
    assert names == ["day", "model", "tier", "requests", "prompt", "cached", "output", "USD"]
    assert line[:7] == ["2023-11-14", "smollm2-135m-instruct", "standard", "2", "200", "128", "10"]
    key_total = json.loads(headrace("usage", "--key", "key_x", "--json")[1])["total_usd"]
    assert line[7] == key_total
